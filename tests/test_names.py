"""One word for one thing: a public class name is defined in one module of the packages."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("files", "decoding", "models", "configs", "actors", "pipeline", "jobs")


def modules_of_classes(modules: dict[str, str]) -> dict[str, list[str]]:
    """Public class name → modules that define it at their top level; `modules` maps names to sources."""
    names: dict[str, list[str]] = {}
    for module, source in modules.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(module)
    return names


def repeated(modules: dict[str, str]) -> dict[str, list[str]]:
    return {name: where for name, where in modules_of_classes(modules).items() if len(where) > 1}


def test_a_public_class_name_is_defined_in_one_module() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    modules = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    assert len(modules_of_classes(modules)) > 300
    assert repeated(modules) == {}


def test_the_check_finds_a_second_meaning_of_a_class_name() -> None:
    modules = {
        "a.py": "class Verdict:\n    class Row: ...\n\nclass _Row: ...\n",
        "b.py": "class Verdict: ...\n\nclass _Row: ...\n\nclass Row: ...\n",
    }
    assert repeated(modules) == {"Verdict": ["a.py", "b.py"]}
