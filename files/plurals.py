"""Formats counts with their nouns for messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a count and its noun, such as `1 file` and `2,000 files`; `plural` is the noun with an s by default."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
