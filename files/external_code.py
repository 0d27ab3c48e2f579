"""Finds Python code that a job file names as `module:name`, records its digest, and imports it in every process.

Code beside the job file, in the working directory, or in folders of PYTHONPATH is shipped to workers: the module, the
packages around it, and the modules of the same folder that they import. All processes run the text that was hashed.
Installed modules are not shipped.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType
from typing import Any

from files.installation import IS_INSTALLED, ROOT
from files.local import read_regular

PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""A name of external code: a dotted module, a colon, and a name in it."""
MAX_FILES = 256
MAX_BYTES = 4 << 20
"""Maximum number and size of the files of one name; sources are sent to every worker process."""
_CHECKOUT = "actors benchmarks configs decoding docgen draftfleet files jobs models pipeline zoo"
OWN = ("draftfleet",) if IS_INSTALLED else tuple(_CHECKOUT.split())
"""Packages whose names are taken: those of a checkout, or the installed package."""


class ExternalCodeError(ValueError):
    """Raised for code that cannot be found, shipped or imported; the message is a sentence about the name."""


def is_external(name: str) -> bool:
    """Return whether a `kind` names external code."""
    return re.fullmatch(PATTERN.strip("^$"), name) is not None


@dataclass(frozen=True)
class SourceFile:
    """A module to ship; `path` is its file where it was found, empty for a folder without `__init__.py`."""

    module: str
    path: str
    text: bytes
    is_package: bool


@dataclass(frozen=True)
class ExternalCode:
    """The files of external modules by module, and the SHA-256 of each name over all files that it needs."""

    files: Mapping[str, SourceFile] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)


def find(names: Sequence[str], folders: Sequence[Path]) -> ExternalCode:
    """Find external code, in `folders` first, without running it.

    Raises:
        ExternalCodeError: a module does not exist, has the name of another module, is no valid Python, or needs more
            than `MAX_FILES` files or `MAX_BYTES`.
    """
    searched = dict.fromkeys(path.resolve() for path in (*folders, *map(Path, _user_paths())))
    roots = [path for path in searched if path.is_dir()]
    files: dict[str, SourceFile] = {}
    digests: dict[str, str] = {}
    for name in names:
        module = name.partition(":")[0]
        root = _root_of(name, module, roots)
        sources = _closure(module, root) if root else {module: _installed(name, module, roots)}
        files |= sources if root else {}
        digests[name] = _digest(sources)
    return ExternalCode(files, digests)


def _user_paths() -> Iterator[str]:
    """Yield the folders of `sys.path` that belong to no Python installation."""
    prefixes = tuple({str(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)})
    for entry in sys.path:
        path = str(Path(entry or ".").resolve())
        if not path.startswith(prefixes) and "site-packages" not in path and "dist-packages" not in path:
            yield path


def _root_of(name: str, module: str, roots: Sequence[Path]) -> Path | None:
    """Return the folder that has the module's top-level package; None if it is installed."""
    top = module.partition(".")[0]
    here = next((root for root in roots if _file_of(top, root) is not None), None)
    if top in OWN:
        if here is not None and here != ROOT:
            raise ExternalCodeError(f"{_location(top, here)} would shadow the package {top!r} of draftfleet; rename it")
        return None
    if here is None:
        return None
    if top in sys.stdlib_module_names:
        raise ExternalCodeError(f"{_location(top, here)} would shadow the module {top!r} of Python; rename it")
    others = [entry for entry in sys.path if Path(entry or ".").resolve() not in roots]
    elsewhere = PathFinder.find_spec(top, others)
    origin = elsewhere and (elsewhere.origin or next(iter(elsewhere.submodule_search_locations or ()), None))
    if origin and not Path(origin).resolve().is_relative_to(here):
        raise ExternalCodeError(f"{_location(top, here)} would shadow the installed module {origin}; rename it")
    return here


def _location(module: str, root: Path) -> str:
    source = _file_of(module, root)
    return source.path or str(root / module) if source else str(root / module)


def _file_of(module: str, root: Path) -> SourceFile | None:
    """Return a module's file below a folder without its text; None if there is none."""
    stem = root.joinpath(*module.split("."))
    if stem.joinpath("__init__.py").is_file():
        return SourceFile(module, str(stem / "__init__.py"), b"", True)
    if stem.with_suffix(".py").is_file():
        return SourceFile(module, str(stem.with_suffix(".py")), b"", False)
    if stem.is_dir() and next(stem.glob("*.py"), None) is not None:
        return SourceFile(module, "", b"", True)
    return None


def _closure(module: str, root: Path) -> dict[str, SourceFile]:
    """Return the module, its packages, and the modules of the same folder that they import, by name."""
    sources: dict[str, SourceFile] = {}
    waiting, num_bytes = [module], 0
    while waiting:
        current = waiting.pop()
        parts = current.split(".")
        for dotted in (".".join(parts[: depth + 1]) for depth in range(len(parts))):
            if dotted in sources:
                continue
            source = _file_of(dotted, root)
            if source is None:
                if current == module:
                    hint = f"; write {module.removesuffix('.py')!r}" if module.endswith(".py") else ""
                    raise ExternalCodeError(f"there is no module {module!r} in {root}{hint}")
                break  # a name in the package, and no module
            text = _read(source)
            sources[dotted] = SourceFile(dotted, source.path, text, source.is_package)
            num_bytes += len(text)
            if len(sources) > MAX_FILES or num_bytes > MAX_BYTES:
                raise ExternalCodeError(
                    f"{module!r} imports more than {MAX_FILES} files or {MAX_BYTES:,} bytes of {root}; install it as a "
                    "package on every machine"
                )
            waiting += [name for name in _imports(sources[dotted]) if _is_local(name, root)]
    return sources


def _is_local(name: str, root: Path) -> bool:
    """Return whether a name that external code imports is in its folder. Raises ExternalCodeError if a module there has
    the name of a module of Python or of draftfleet."""
    top = name.partition(".")[0]
    if root == ROOT or _file_of(top, root) is None:
        return top not in OWN and _file_of(top, root) is not None
    for owner, names in (("Python", sys.stdlib_module_names), ("draftfleet", OWN)):
        if top in names:
            raise ExternalCodeError(f"{_location(top, root)} has the name of a module of {owner}; rename it")
    return True


def _read(source: SourceFile) -> bytes:
    if not source.path:
        return b""
    try:
        return read_regular(source.path, MAX_BYTES)
    except OSError as error:
        raise ExternalCodeError(f"{source.path} cannot be read: {error.strerror or error}") from None


def _imports(source: SourceFile) -> Iterator[str]:
    """Yield every dotted name that a file may import, also inside functions."""
    try:
        tree = ast.parse(source.text, source.path)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ExternalCodeError(f"{source.path}{line} is no valid Python: {error}") from None
    package = source.module if source.is_package else source.module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names if base)


def _installed(name: str, module: str, roots: Sequence[Path]) -> SourceFile:
    """Return the file of an installed module, with its text for the digest."""
    try:
        # A module that was found before, and whose file is gone, can still be imported.
        spec = None if module in _FINDER.files else importlib.util.find_spec(module)
    except Exception as error:  # importing the packages above it runs their code
        raise ExternalCodeError(f"{module!r} cannot be imported: {type(error).__name__}: {error}") from None
    if spec is None:
        folders = ", ".join(map(str, roots)) or "no folder"
        raise ExternalCodeError(f"there is no module {module!r}: neither in {folders}, nor installed")
    if not spec.origin or not Path(spec.origin).is_file():
        raise ExternalCodeError(f"{module!r} has no file, so it cannot be recorded; name the module that defines it")
    return SourceFile(module, spec.origin, _read(SourceFile(module, spec.origin, b"", False)), False)


def _digest(files: Mapping[str, SourceFile]) -> str:
    total = hashlib.sha256()
    for module in sorted(files):
        total.update(f"{module}\0{hashlib.sha256(files[module].text).hexdigest()}\n".encode())
    return total.hexdigest()


class _Loader(InspectLoader):
    def __init__(self, source: SourceFile) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source.text)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source.text, self._source.path or f"<{fullname}>")

    def is_package(self, fullname: str) -> bool:
        return self._source.is_package


class _Finder(MetaPathFinder):
    """Imports installed `SourceFile`s before any path is searched."""

    def __init__(self) -> None:
        self.files: dict[str, SourceFile] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if (source := self.files.get(fullname)) is None:
            return None
        spec = ModuleSpec(fullname, _Loader(source), origin=source.path or None, is_package=source.is_package)
        spec.has_location = bool(source.path)
        return spec


_FINDER = _Finder()


def install(files: Mapping[str, SourceFile]) -> None:
    """Import these modules from their recorded text in this process from now on, all of them anew if the text of one
    has changed."""
    known = _FINDER.files
    if any(module in known and known[module].text != source.text for module, source in files.items()):
        for module in files:
            sys.modules.pop(module, None)
    _FINDER.files |= files
    if files and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def shipping() -> Callable[[], None]:
    """Return a function that installs the files of this process in another one; it is pickled by value."""
    files = [(source.module, source.path, source.text, source.is_package) for source in _FINDER.files.values()]
    module = __name__

    def install_there() -> None:
        if files:
            import importlib

            code = importlib.import_module(module)
            code.install({values[0]: code.SourceFile(*values) for values in files})

    return install_there


def place_of(error: BaseException) -> str:
    """Return "; FILE, line N" of the last line of external code that an error went through; empty if there is none."""
    paths = {source.path for source in _FINDER.files.values()}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in paths]
    return f"; {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def load(name: str) -> Any:
    """Import `module:name` and return the object.

    Raises:
        ExternalCodeError: the module raises an error, or has no such name.
    """
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module raises any error
        reason = f"{type(error).__name__}: {error}{place_of(error)}"
        raise ExternalCodeError(f"{module!r} cannot be imported: {reason}") from None
    if not hasattr(imported, attribute):
        names = ", ".join(sorted(member for member in vars(imported) if not member.startswith("_"))[:8])
        raise ExternalCodeError(f"{module!r} has no {attribute!r}; it has {names}")
    return getattr(imported, attribute)
