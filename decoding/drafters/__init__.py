"""Drafters: where drafts come from."""

from decoding.drafters.model import ModelDrafter
from decoding.drafters.none import NoDrafter

__all__ = ["ModelDrafter", "NoDrafter"]
