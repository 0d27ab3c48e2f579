"""Write every generated page, or compare the committed pages with the code.

python -m docgen            # rewrites docs/reference/* and the generated parts of other pages
python -m docgen --check    # changes nothing; exit status 1 and the names of outdated pages
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docgen import (
    checkpoint_keys,
    columns,
    commands,
    config,
    families,
    generation,
    markdown,
    methods,
    modules,
    refusals,
    size,
)

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path("docs/reference")


def generate(root: Path) -> dict[Path, str]:
    """Return the text of every generated page, and of pages with generated parts, by path relative to `root`."""
    pages = {
        REFERENCE / "checkpoint-keys.md": checkpoint_keys.checkpoint_keys_page(),
        REFERENCE / "columns.md": columns.columns_page(),
        REFERENCE / "error-codes.md": columns.error_codes_page(root),
        REFERENCE / "families.md": families.families_page(),
        REFERENCE / "generation-settings.md": generation.generation_page(),
        REFERENCE / "metrics.md": columns.metrics_page(),
        REFERENCE / "commands.md": commands.commands_page(root),
        REFERENCE / "modules.md": modules.modules_page(root),
        REFERENCE / "presets.md": methods.presets_page(root),
        REFERENCE / "refusals.md": refusals.refusals_page(),
        Path("docs/design/size.md"): size.size_page(),
    }
    for job, model in config.JOBS.items():
        pages[REFERENCE / f"config-{job}.md"] = config.reference(job, model)
        pages[REFERENCE / f"schema/{job}.json"] = config.json_schema(model)
    for path, body in (("README.md", methods.short_list(root)), ("docs/methods/index.md", methods.long_table(root))):
        pages[Path(path)] = markdown.fill((root / path).read_text(), "methods", body)
    return pages


def outdated(root: Path) -> dict[Path, str]:
    """Return the new text of every page that differs from the committed one, by path relative to `root`."""
    new = generate(root)
    return {path: text for path, text in new.items() if not (root / path).exists() or (root / path).read_text() != text}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if `--check` found an outdated page."""
    parser = argparse.ArgumentParser(prog="python -m docgen", description="Generate the reference pages from code.")
    parser.add_argument("--check", action="store_true", help="compare only; exit status 1 if a page is outdated")
    arguments = parser.parse_args(argv)
    pages = outdated(ROOT)
    for path, text in pages.items():
        print(f"{'outdated' if arguments.check else 'wrote'} {path}")
        if not arguments.check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text)
    return 1 if arguments.check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
