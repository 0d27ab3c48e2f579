"""Stand-ins that travel to Ray's workers: a source of rows in memory, and a pair that can kill its own process."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from configs.schema import CaptionJob
from decoding.types import Completion
from pipeline.asking import Asking
from pipeline.datasource import SpanDatasource
from pipeline.media import DecodeOptions, decode_table
from pipeline.video import clips
from pipeline.video.worker import VideoWorker
from tests.actors.fakes import FakeEngine, FakePair, decoded_table


class RowsInMemory(Datasource):
    """One read task per span of rows that are already in the stage `decoded`."""

    def __init__(self, spans: list[list[dict[str, Any]]]) -> None:
        self.spans = spans

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        tasks = []
        for span in self.spans:
            metadata = BlockMetadata(num_rows=len(span), size_bytes=None, input_files=None, exec_stats=None)
            tasks.append(ReadTask(lambda span=span: [decoded_table(span)], metadata))
        return tasks


def as_it_is(table: pa.Table) -> pa.Table:
    return table


def seven_of_each(table: pa.Table) -> pa.Table:
    """Every row seven times, as the clips of its video would come."""
    rows = table.take([row for row in range(table.num_rows) for _ in range(7)])
    ids = [f"{sample_id}@{place % 7}" for place, sample_id in enumerate(rows["sample_id"].to_pylist())]
    return rows.set_column(0, "sample_id", pa.array(ids))


class MortalEngine(FakeEngine):
    """Dies with its process, once, after the first rows of a batch have finished."""

    def __init__(self, slots: int, lease: Path) -> None:
        super().__init__(slots)
        self.lease = lease
        self.num_done = 0

    def step(self) -> list[Completion]:
        done = super().step()
        self.num_done += len(done)
        if self.num_done >= 5 and not self.lease.exists():
            self.lease.touch()
            os._exit(1)
        return done


class MortalPair(FakePair):
    """Gives engines that die once in the life of the file `lease`."""

    def __init__(self, lease: Path) -> None:
        super().__init__()
        self.lease = lease

    def engine(self, slots: int, max_context_tokens: int) -> FakeEngine:
        return MortalEngine(slots, self.lease)


class LoadFake:
    """Loads a fake pair; with a `lease`, one that dies once."""

    def __init__(self, lease: Path | None = None) -> None:
        self.lease = lease

    def __call__(self, config: CaptionJob, num_threads: int | None) -> FakePair:
        return MortalPair(self.lease) if self.lease else FakePair()


# --- hostile inputs ------------------------------------------------------------------------------------------------


class _FakeFrontEnd:
    special_tokens = ("<image>", "</s>")


class FakePairInfo:
    """What is known of a pair that is a fake."""

    target_id = "fake"
    drafter_id = ""
    revisions: ClassVar[dict[str, str]] = {}
    front_end = _FakeFrontEnd()

    def asking(self, config: CaptionJob) -> Asking:
        return Asking.of(config, self.front_end.special_tokens)


MORTAL = """
import os, signal
from pipeline.video import child
probe = child.probe
def crashing(path, max_pixels):
    if path.endswith("mortal.mp4"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return probe(path, max_pixels)
child.probe = crashing
child.main()
"""


def decode_mortally(table: pa.Table, options: DecodeOptions, peaks: Path) -> pa.Table:
    """Decode, with a decoders' process that one video ends; notes what this process has held."""
    assert options.videos is not None
    key = (options.videos.decoder, options.videos.sampling, options.videos.limits)
    if key not in clips._running:
        clips.close_worker()
        clips._running[key] = VideoWorker(*key, [sys.executable, "-c", MORTAL])
    try:
        return decode_table(table, options)
    finally:
        note_peak(peaks)


def note_peak(folder: Path) -> None:
    """Leave the largest resident size of this process, in bytes, in a file of its own."""
    status = Path("/proc/self/status").read_text()
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    (folder / str(os.getpid())).write_text(str(int(peak_kib) * 1024))


class Noted(Datasource):
    """A source of spans whose read tasks note what their process has held."""

    def __init__(self, source: SpanDatasource, peaks: Path) -> None:
        self.source, self.peaks = source, peaks
        self.num_samples, self.num_spans = source.num_samples, source.num_spans

    def estimate_inmemory_data_size(self) -> int | None:
        return self.source.estimate_inmemory_data_size()

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        return [
            ReadTask(partial(_read_and_note, task, self.peaks), task.metadata, schema=task.schema)
            for task in self.source.get_read_tasks(parallelism)
        ]


def _read_and_note(task: ReadTask, peaks: Path) -> list[pa.Table]:
    try:
        return list(task())
    finally:
        note_peak(peaks)
