"""Contexts: build the prompt that one lane of the drafter receives for a sample."""

from decoding.contexts.full import Full, Unconditional
from decoding.contexts.pooled import Pooled
from decoding.contexts.pruned import Pruned
from decoding.contexts.text import Caption, TextOnly

__all__ = ["Caption", "Full", "Pooled", "Pruned", "TextOnly", "Unconditional"]
