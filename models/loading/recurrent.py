"""Reads from a configuration whether a model has recurrent layers, before any weights are loaded."""

from __future__ import annotations

from typing import Any

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "mamba", "mamba2", "hybrid"})
"""Names of `layer_types` whose layers have a state instead of, or beside, keys and values."""


def recurrent_types(config: Any) -> list[str]:
    """Return the types of recurrent layers of a model's configuration, sorted; none if its layers all attend."""
    text = config.get_text_config(decoder=True)
    return sorted(RECURRENT_TYPES.intersection(map(str, getattr(text, "layer_types", None) or ())))
