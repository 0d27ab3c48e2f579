"""Acceptance rules: which drafts the target takes, and the token that follows."""

from decoding.acceptance.exact import Exact
from decoding.acceptance.rejection import Rejection

__all__ = ["Exact", "Rejection"]
