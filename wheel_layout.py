"""Builds wheels: top-level packages of the checkout become packages below `draftfleet`, with their imports prefixed.

`pyproject.toml` names `BuildPackages` as setuptools' command `build_py`. Imports are found in the syntax tree, and line
numbers stay the same. An import or a module name that cannot be prefixed ends the build.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NAME = "draftfleet"
PACKAGES = ("jobs", "pipeline", "actors", "decoding", "models", "configs", "files")
MODELS = tuple(
    f"zoo/checkpoints/{name}" for name in ("caption_target", "caption_drafter", "image_target", "image_t5", "image_vq")
)
"""Shipped models: those of the job files `demo_caption`, `zoo_caption` and `zoo_images_plain`."""
COPIED = (f"{NAME}/__main__.py", f"{NAME}/py.typed")
INIT = '"""Offline batch captioning and image synthesis with speculative decoding on Ray Data."""\n'
_FROM = re.compile(rb"from[ \t]+(?=[A-Za-z_])")


class LayoutError(ValueError):
    """Raised for an import or a module name that cannot be prefixed; the message names the file and the line."""


class BuildPackages(build_py):  # type: ignore[misc]
    """The command `build_py` with this layout. In an editable install, the checkout itself is the package."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        target = Path(self.build_lib)
        shutil.rmtree(target / NAME, ignore_errors=True)
        for place, content in wheel_files(ROOT):
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            (target / place).write_bytes(content)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        if self.editable_mode:
            return list(super().get_outputs(include_bytecode))
        return [str(Path(self.build_lib, place)) for place, _ in wheel_files(ROOT)]

    def get_source_files(self) -> list[str]:
        """Return all files that a wheel is built from, for source distributions."""
        own = [*COPIED, f"{NAME}/__init__.py", f"{NAME}/checkout.py", "wheel_layout.py"]
        return [*own, *(path.relative_to(ROOT).as_posix() for path in sources(ROOT))]


def sources(root: Path) -> Iterator[Path]:
    """Yield the files of the packages and of the shipped models."""
    for folder in (*PACKAGES, *MODELS):
        found = sorted(path for path in (root / folder).rglob("*") if path.is_file())
        if not found:
            raise LayoutError(f"{root / folder}: the folder is missing or empty")
        yield from (
            path
            for path in found
            if path.suffix != ".pyc" and not any(part[0] == "." for part in path.relative_to(root).parts)
        )


def wheel_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of every file of a wheel. Raises LayoutError."""
    yield f"{NAME}/__init__.py", INIT.encode()
    for path in (*(root / name for name in COPIED), *sources(root)):
        place = path.relative_to(root).as_posix()
        content = path.read_bytes()
        if path.suffix == ".py":
            content = prefixed(content, place, root)
        yield place if place.startswith(f"{NAME}/") else f"{NAME}/{place}", content


def prefixed(source: bytes, place: str, root: Path = ROOT) -> bytes:
    """Return the source with `draftfleet.` before the modules of this project in its absolute imports.

    `root` is the checkout, in which module names in strings are looked up.

    Raises:
        LayoutError: `import a.b` without `as`, a name that is split by a line continuation, or a string that is the
            name of a module of this project, with the place and the line.
    """
    tree = ast.parse(source, place)
    lines = source.split(b"\n")
    edits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_own(node.module or ""):
            start = _FROM.match(lines[node.lineno - 1], node.col_offset)
            edits.append((node.lineno, -1 if start is None else start.end(), node.module or ""))
        elif isinstance(node, ast.Import):
            edits += [_edit_of(alias, place) for alias in node.names if _is_own(alias.name)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_module(node.value, root):
            raise LayoutError(
                f"{place}:{node.lineno}: the string {node.value!r} is the name of a module; derive it from __name__, "
                "__package__ or __spec__"
            )
    for number, column, name in sorted(edits, reverse=True):
        line = lines[number - 1]
        if column < 0 or not line.startswith(name.encode(), column):
            raise LayoutError(f"{place}:{number}: write the import of {name} in one line")
        lines[number - 1] = line[:column] + f"{NAME}.".encode() + line[column:]
    return b"\n".join(lines)


def _edit_of(alias: ast.alias, place: str) -> tuple[int, int, str]:
    if alias.asname is None:
        raise LayoutError(
            f"{place}:{alias.lineno}: `import {alias.name}` cannot be prefixed; write `from … import …`, or add `as`"
        )
    return alias.lineno, alias.col_offset, alias.name


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in (*PACKAGES, "zoo")


def _is_module(text: str, root: Path) -> bool:
    """Return whether a text is the dotted name of a module or folder of this project."""
    if not re.fullmatch(r"[a-z]\w*(?:\.\w+)+", text) or not _is_own(text):
        return False
    path = root.joinpath(*text.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()
