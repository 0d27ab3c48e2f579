"""Runs this engine without one piece of the CPU backend: `python -m benchmarks.peers.piece_peer WORK MODE/PIECE`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from benchmarks.harness.process import Work, serve
from benchmarks.peers.engine_peer import EngineRunner

CPU, COMPLETE = "models.backends.cpu", "complete"
PIECES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    COMPLETE: nullcontext,
    "GEMM kernel": lambda: mock.patch(f"{CPU}.packing.can_multiply", return_value=False),
    "attention kernel": lambda: mock.patch(f"{CPU}.layer_graph.can_attend", return_value=False),
    "direct graph calls": lambda: mock.patch(f"{CPU}.layer_graph._picker", return_value=None),
    "decoder frame": lambda: mock.patch(f"{CPU}.compiled.FrameRecorder.frame", return_value=None),
    "huge pages": lambda: mock.patch(f"{CPU}.huge_pages._madvise", return_value=None),
}
"""Piece → makes a context in which the backend runs without it."""


def load(work: Work, mode: str) -> EngineRunner:
    return EngineRunner(work, mode.partition("/")[0])


if __name__ == "__main__":
    with PIECES[sys.argv[2].partition("/")[2]]():
        sys.exit(serve(load))
