"""Generates the reference of modules: the first sentence of every module's docstring, by package and folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docgen.markdown import page, table

PACKAGES = (
    "draftfleet",
    "jobs",
    "configs",
    "pipeline",
    "actors",
    "decoding",
    "models",
    "files",
    "zoo",
    "benchmarks",
    "docgen",
)
SOURCES = (".cpp", ".h")


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring or of a C++ source's leading comment; empty without one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in SOURCES:
        text = " ".join(line.removeprefix("//").strip() for line in text.splitlines() if line.startswith("//"))
    else:
        text = ast.get_docstring(ast.parse(text)) or ""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    match = re.match(r"(.+?[.:;])(?= [A-Z]|$)", paragraph)
    return (match[1] if match else paragraph).rstrip(":;")


def modules_page(root: Path) -> str:
    """Render one table per folder."""
    parts = [
        "Imports point one way: `jobs` → `pipeline` → `actors` → `decoding` → `models`. The first three use `configs`; "
        "all use `files`."
    ]
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (root / package).rglob("*.py")}):
            files = sorted(path for path in folder.iterdir() if path.suffix in (".py", *SOURCES))
            modules = [path for path in files if path.name != "__init__.py"]
            init = folder / "__init__.py"
            parts.append(f"## {folder.relative_to(root).as_posix()}")
            if init.exists() and (sentence := first_sentence(init)):
                parts.append(sentence)
            if modules:
                parts.append(
                    table(("module", "content"), [[f"`{path.name}`", first_sentence(path)] for path in modules])
                )
    return page("Modules", *parts)
