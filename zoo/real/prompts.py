"""Prompts of real text: the documentation of Python's standard library, read from the interpreter's own source files.

Files are parsed, never imported. The texts depend on the Python version; their order and split do not depend on the
machine.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TASKS = (
    "Summarise this documentation in one paragraph.",
    "Explain this to a beginner in plain words.",
    "Write three questions that this text answers, each with its answer.",
    "Rewrite this text as a list of short bullet points.",
)
"""What is asked about a text, in turn by its hash."""
SHORTEST, LONGEST = 160, 1200
"""Characters of a text."""
MAX_FILE_BYTES = 2_000_000
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
HELD_OUT_SHARE = 0.2
"""Share of the texts, by hash, that no drafter is trained on."""


@dataclass(frozen=True)
class Prompt:
    """One row of the source: `id` is module and qualified name, `split` is `train` or `held_out`."""

    id: str
    task: str
    text: str
    split: str


def read_prompts(library: Path | None = None) -> list[Prompt]:
    """Return the prompts of a library's documentation (default: this interpreter's), in the order of hashes of their
    texts; equal texts appear once."""
    root = library or Path(sysconfig.get_paths()["stdlib"])
    prompts: dict[str, Prompt] = {}
    for name, text in _docstrings(root):
        key = hashlib.sha256(text.encode()).hexdigest()
        task = TASKS[int(key[:8], 16) % len(TASKS)]
        split = "held_out" if int(key[8:16], 16) < HELD_OUT_SHARE * 2**32 else "train"
        prompts.setdefault(key, Prompt(name, task, text, split))
    return [prompts[key] for key in sorted(prompts)]


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED.intersection(parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        for name, node in _documented(tree, module):
            text = ast.get_docstring(node)
            if text and SHORTEST <= len(text) <= LONGEST:
                yield f"{name}:{getattr(node, 'lineno', 0)}", text


def _documented(
    node: ast.AST, name: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield name, node
    for child in ast.iter_child_nodes(node):
        inner = (
            f"{name}.{child.name}" if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) else name
        )
        yield from _documented(child, inner)
