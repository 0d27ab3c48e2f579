"""Loops in C++ for CPUs, built by torch's own builder when they are first needed, which keeps what it built between
processes. Knows files and functions; nothing of what they compute.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Loops:
    """One library of `sources`, which follow one another, and of `functions`: what each takes.

    Where it cannot be built, `otherwise` says what that means, in a warning, once.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        functions: Mapping[str, Sequence[Any]],
        otherwise: str,
        flags: Sequence[str] = (),
    ) -> None:
        self._sources = tuple(sources)
        self._functions = functions
        self._otherwise = otherwise
        self._flags = tuple(flags)
        self._built: ctypes.CDLL | None = None
        self._was_tried = False

    @property
    def is_at_work(self) -> bool:
        """Whether it is built: whoever has others built then need not fear for a short job."""
        return self._built is not None

    def library(self) -> ctypes.CDLL | None:
        """The library, built now if need be; None where it cannot be."""
        if not self._was_tried:
            try:
                self._built = self._build()
            except Exception as error:  # compilers and what starts them fail in ways of their own
                reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
                logger.warning("%s: %s", self._otherwise, reason)
            # Last, so that another thread does not take what is being built for what cannot be.
            self._was_tried = True
        return self._built

    def _build(self) -> ctypes.CDLL:
        # Most processes never compile, and importing this takes a second.
        from torch._inductor.codecache import CppCodeCache

        text = "\n".join(source.read_text() for source in self._sources)
        library: ctypes.CDLL = CppCodeCache.load(text, extra_flags=self._flags)
        for name, takes in self._functions.items():
            getattr(library, name).argtypes = list(takes)
            getattr(library, name).restype = None
        return library


def beside(*names: str) -> tuple[Path, ...]:
    """Sources that lie beside this file."""
    return tuple(Path(__file__).with_name(name) for name in names)
