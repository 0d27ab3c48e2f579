"""Contexts: build the prompt that one lane of the drafter receives for a sample."""

from decoding.contexts.pooled import Pooled
from decoding.contexts.pruned import Full, Pruned, Unconditional
from decoding.contexts.text import Caption, TextOnly

__all__ = ["Caption", "Full", "Pooled", "Pruned", "TextOnly", "Unconditional"]
