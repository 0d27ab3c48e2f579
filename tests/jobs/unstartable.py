"""Picklable loaders whose engine never starts: one raises, one ends its process; both count their attempts in files."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4


class LoadRaising:
    """Raises, as a loader does for damaged weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, config: Any, num_threads: int | None) -> Any:
        (self.folder / uuid4().hex).touch()
        self.end()

    def end(self) -> None:
        raise RuntimeError("model.target: weights are damaged: header too large")


class LoadKilled(LoadRaising):
    """Ends its process, as the kernel does if the machine's memory is full."""

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
