"""Build C++ libraries for CPUs at first use with torch's `CppCodeCache`, which caches them between processes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Library:
    """A C++ library built from concatenated `_sources`; `_functions` maps names to ctypes argument types.

    If the build fails, the warning `_fallback` is logged once, with the reason.
    """

    _sources: Sequence[Path]
    _functions: Mapping[str, Sequence[Any]]
    _fallback: str
    _flags: Sequence[str] = ()
    _built: ctypes.CDLL | None = None
    _was_tried: bool = False

    def library(self) -> ctypes.CDLL | None:
        """Return the library, which is built at the first call; None if the build fails."""
        if not self._was_tried:
            try:
                self._built = self._build()
            except Exception as error:  # compilers raise errors of many types
                reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
                logger.warning("%s: %s", self._fallback, reason)
            # Set last, so that other threads do not treat a running build as failed.
            self._was_tried = True
        return self._built

    def _build(self) -> ctypes.CDLL:
        # The import takes a second, and most processes never compile.
        from torch._inductor.codecache import CppCodeCache

        text = "\n".join(source.read_text() for source in self._sources)
        library: ctypes.CDLL = CppCodeCache.load(text, extra_flags=self._flags)
        for name, types in self._functions.items():
            getattr(library, name).argtypes = list(types)
            getattr(library, name).restype = None
        return library


def beside(*names: str) -> tuple[Path, ...]:
    """Return the paths of source files in this folder."""
    return tuple(Path(__file__).with_name(name) for name in names)
