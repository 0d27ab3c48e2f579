"""Imports in a checkout: `draftfleet.X` is the module object of `X`; a foreign package of the same name is refused."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jobs", "pipeline", "actors", "decoding", "models", "configs", "files", "zoo")
"""Top-level packages of a checkout, which are packages below `draftfleet` in a wheel."""


class Aliases(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds `draftfleet.X.Y` and loads it as the module `X.Y`; finds `X` in this checkout, whatever is put on
    `sys.path` later: Ray puts the working directory of the driver before all other folders of its workers."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in PACKAGES:
            return importlib.machinery.PathFinder.find_spec(name, [str(ROOT)])
        prefix, _, own = name.partition(".")
        if prefix != "draftfleet" or own.partition(".")[0] not in PACKAGES:
            return None
        found = importlib.util.find_spec(own)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(name, self, origin=found.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new, empty module by the real one. The real one keeps its own `__spec__`, because the import
        system returns the entry of `sys.modules` and sets attributes only of the module that it made."""
        sys.modules[module.__name__] = importlib.import_module(_own(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the real module, for `python -m draftfleet.X.Y`."""
        found = importlib.util.find_spec(_own(fullname))
        loader = found.loader if found is not None else None
        assert isinstance(loader, importlib.abc.InspectLoader), fullname
        return loader.get_code(_own(fullname))

    def get_source(self, fullname: str) -> str | None:
        """Return None: tools read the file that the real module names."""
        return None


def _own(name: str) -> str:
    return name.partition(".")[2]


def install() -> None:
    """Put the checkout on `sys.path` and make `draftfleet.X` importable. Raises ImportError for a foreign package."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    refuse_foreign()
    if not any(isinstance(finder, Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, Aliases())


def refuse_foreign() -> None:
    """Raise ImportError if another folder of `sys.path` has a package or module named like one of this checkout and
    comes first, or one was imported already."""
    for name in PACKAGES:
        own = ROOT / name / "__init__.py"
        module = sys.modules.get(name)
        found = importlib.machinery.PathFinder.find_spec(name) if module is None else module.__spec__
        place = None if found is None else found.origin
        if place is not None and Path(place).resolve() != own.resolve():
            raise ImportError(
                f"the package {name!r} of {Path(place).parent} comes before {own.parent} on sys.path; run from another "
                "folder, change PYTHONPATH, or install a wheel of draftfleet, whose packages have names of their own"
            )
