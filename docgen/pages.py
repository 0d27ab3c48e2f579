"""All generated pages by path."""

from __future__ import annotations

from pathlib import Path

from docgen import columns, commands, config, markdown, methods, modules, size

REFERENCE = Path("docs/reference")


def generate(root: Path) -> dict[Path, str]:
    """Path relative to `root` → text of every generated page, and of pages with generated parts."""
    made = {
        **{
            REFERENCE / f"config-{job}.md": config.reference(job, command, model) for job, command, model in config.JOBS
        },
        **{REFERENCE / f"schema/{job}.json": config.json_schema(model) for job, _, model in config.JOBS},
        REFERENCE / "columns.md": columns.columns_page(),
        REFERENCE / "error-codes.md": columns.error_codes_page(root),
        REFERENCE / "metrics.md": columns.metrics_page(),
        REFERENCE / "commands.md": commands.commands_page(root),
        REFERENCE / "modules.md": modules.modules_page(root),
        REFERENCE / "presets.md": methods.presets_page(root),
        Path("docs/design/size.md"): size.size_page(),
    }
    for path, body in (
        (Path("README.md"), methods.short_table(root)),
        (Path("docs/methods/index.md"), methods.long_table(root)),
    ):
        made[path] = markdown.fill((root / path).read_text(), "methods", body)
    return made
