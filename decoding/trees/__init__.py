"""Tree policies: which drafts are proposed, whatever drafter gives the distributions."""

from decoding.trees.dynamic import DynamicTree
from decoding.trees.static import StaticTree, branching_paths, chain

__all__ = ["DynamicTree", "StaticTree", "branching_paths", "chain"]
