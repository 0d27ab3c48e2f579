"""Generates the reference of generation settings and their use."""

from __future__ import annotations

from actors.loading.generation import SETTINGS, Setting
from docgen.markdown import page, table


def generation_page() -> str:
    """Render every generation setting of transformers with its use."""
    rows = [[f"`{name}`", _use(name, setting)] for name, setting in SETTINGS.items()]
    return page(
        "Generation settings",
        "What a caption job does with the settings of a target's `generation_config.json`, or of `config.json` without "
        "such a file: [generation settings](../guides/caption.md#generation-settings).",
        table(("setting", "use"), rows),
    )


def _use(name: str, setting: Setting) -> str:
    if setting.use == "processor":
        return f"followed unless the job sets `sampling.{name}`"
    if setting.use == "sampling":
        return f"followed with `sampling.from_checkpoint` unless the job sets `sampling.{setting.key or name}`"
    if setting.use == "none":
        return f"no effect on tokens: {setting.note}"
    values = f" if `{setting.active[0]}`" if setting.active else ""
    when = " with `sampling.from_checkpoint`" if setting.use == "sampler" else values
    return f"refused{when}: {setting.note}"
