"""Generates the reference of checkpoint keys that load code or reach a network."""

from __future__ import annotations

from docgen.markdown import page, table
from models.loading.config_keys import FORBIDDEN_FILES, KERNEL_METHODS, RULES


def checkpoint_keys_page() -> str:
    """Render one table row per rule, and the files that are refused."""
    rules = [
        [
            ", ".join(f"`{key}`" for key in rule.keys),
            ", ".join(f"`{file}`" for file in rule.files),
            f"{rule.effect}{' (dropped unless `allow_remote_code` is set)' if rule.is_code else ''}",
            rule.treatment,
        ]
        for rule in RULES
    ]
    return page(
        "Checkpoint keys",
        "These keys, at any depth of their files, make transformers load code or reach a network. A dropped key has no "
        "effect; a checkpoint with a refused key is refused by its name. "
        "See [checkpoints of strangers](../guides/storage.md#checkpoints-of-strangers).",
        table(("key", "file", "effect in transformers", "treatment"), rules),
        f"`quant_method` is refused for {', '.join(f'`{name}`' for name in sorted(KERNEL_METHODS))}, unless "
        "`dequantize` is true.",
        *(f"`{name}`: refused, because {reason}." for name, reason in FORBIDDEN_FILES.items()),
    )
