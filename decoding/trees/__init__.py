"""Tree policies: decide which drafts are proposed, for any drafter."""

from decoding.trees.chain import Chain
from decoding.trees.confidence import SageSettings
from decoding.trees.dynamic import DynamicTree
from decoding.trees.sage import SageTree
from decoding.trees.sage_online import OnlineSageTree
from decoding.trees.static import StaticTree, branching_paths

__all__ = ["Chain", "DynamicTree", "OnlineSageTree", "SageSettings", "SageTree", "StaticTree", "branching_paths"]
