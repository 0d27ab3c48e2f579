"""Picklable fakes for Ray's workers that kill their own process: in decoding, at admission, in mid-generation."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pyarrow as pa

from configs.schema import CaptionJobConfig
from decoding.types import Completion
from tests.actors.fakes import FakeEngine, FakePair


def count_death(folder: Path, name: str) -> None:
    """Leave a file behind for every death, so that a test can count them."""
    (folder / f"{name}-{os.getpid()}-{len(list(folder.iterdir()))}").touch()


def decode_or_die(table: pa.Table, folder: Path) -> pa.Table:
    """Rows unchanged; a row with the text SEGFAULT ends the process as a crashing native decoder does."""
    for sample_id, messages, code in zip(
        *(table[name].to_pylist() for name in ("sample_id", "messages", "error_type")), strict=True
    ):
        if "SEGFAULT" in messages and not code:
            count_death(folder, sample_id)
            faulthandler.disable()  # its report of this intended crash would be a page of the log
            os.kill(os.getpid(), signal.SIGSEGV)
    return table


class PoisonedEngine(FakeEngine):
    """Ends its process when a row with POISON is admitted, and in the last step of a row with LATE."""

    def __init__(self, slots: int, folder: Path) -> None:
        super().__init__(slots)
        self.folder = folder

    def step(self) -> list[Completion]:
        for request in list(self.waiting)[: self.slots - len(self.active)]:
            if "POISON" in request.prompt:
                count_death(self.folder, request.sample_id)
                os._exit(1)
        for request, remaining in self.active.values():
            if "LATE" in request.prompt and remaining == 1:
                count_death(self.folder, request.sample_id)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class PoisonedPair(FakePair):
    """Gives such engines."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def engine(self, slots: int) -> FakeEngine:
        return PoisonedEngine(slots, self.folder)


class LoadPoisoned:
    """Loads such a pair."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, config: CaptionJobConfig, num_threads: int | None) -> FakePair:
        return PoisonedPair(self.folder)
