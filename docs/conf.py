"""Sphinx configuration of the documentation site; `make docs` builds it."""

import re
from pathlib import Path
from typing import Any

project = "draftfleet"
author = "the draftfleet developers"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "draftfleet"
root_doc = "index"
myst_heading_anchors = 4
DOCS = Path(__file__).resolve().parent
SECTIONS = ("guides", "methods", "reference", "results", "design")
"""Folders of the site in the order of its contents: guides first, design last."""
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def prepare(app: Any, name: str, source: list[str]) -> None:
    """Add a table of contents to index pages, and turn links to files outside of `docs` into their paths."""
    folder = (DOCS / name).parent
    if name.endswith("index"):
        below = [f"{section}/index" for section in SECTIONS] if name == "index" else ["*"]
        pages = "\n".join([*below, *(["*/index"] if name != "index" and list(folder.glob("*/index.md")) else [])])
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"

    def outside(found: re.Match[str]) -> str:
        path = (folder / found[2]).resolve()
        return found[0] if path.is_relative_to(DOCS) else f"{found[1]} (`{path.relative_to(DOCS.parent)}`)"

    source[0] = LINK.sub(outside, source[0])


def setup(app: Any) -> None:
    """Connect `prepare`."""
    app.connect("source-read", prepare)
