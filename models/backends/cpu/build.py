"""Build C++ libraries for CPUs at first use with torch's `CppCodeCache`, which caches them between processes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Library:
    """A C++ library built from concatenated `sources`; `functions` maps names to ctypes argument types.

    If the build fails, the warning `fallback` is logged once, with the reason.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        functions: Mapping[str, Sequence[Any]],
        fallback: str,
        flags: Sequence[str] = (),
    ) -> None:
        self._sources = tuple(sources)
        self._functions = functions
        self._fallback = fallback
        self._flags = tuple(flags)
        self._built: ctypes.CDLL | None = None
        self._was_tried = False

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
