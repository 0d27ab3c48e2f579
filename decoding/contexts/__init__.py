"""Contexts: what one lane of the drafter sees of a sample."""

from decoding.contexts.full import Full

__all__ = ["Full"]
