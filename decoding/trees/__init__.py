"""Tree policies: which drafts are proposed, whatever drafter gives the distributions."""

from decoding.trees.static import StaticTree, branching_paths, chain

__all__ = ["StaticTree", "branching_paths", "chain"]
