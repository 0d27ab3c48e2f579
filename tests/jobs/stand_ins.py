"""Picklable fakes for Ray's workers: an in-memory row source, and a model pair that can kill its own process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pyarrow as pa
from ray.data import Dataset, Datasource, ReadTask
from ray.data.block import BlockMetadata

import actors.loading.pair
from actors.loading.generation import Generation
from configs.schema import CaptionJobConfig
from decoding.types import Completion
from jobs import caption
from pipeline.media.video import clips
from pipeline.media.video.worker import DecoderWorker
from pipeline.reports.summary import Summary
from pipeline.run.graph import CaptionStages, RunContext, caption_dataset
from pipeline.run.plan import make_plan
from tests.actors.fakes import FakeEngine, FakePair, decoded_table


class RowsInMemory(Datasource):
    """One read task per span of rows, which `table_of` brings into the stage that the graph starts with."""

    def __init__(
        self, spans: list[list[dict[str, Any]]], table_of: Callable[[list[dict[str, Any]]], pa.Table] = decoded_table
    ) -> None:
        self.spans, self.table_of = spans, table_of

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        tasks = []
        for span in self.spans:
            metadata = BlockMetadata(num_rows=len(span), size_bytes=None, input_files=None, exec_stats=None)
            tasks.append(ReadTask(lambda span=span, table_of=self.table_of: [table_of(span)], metadata))
        return tasks


def as_it_is(table: pa.Table) -> pa.Table:
    return table


def seven_of_each(table: pa.Table) -> pa.Table:
    """Every row seven times, as the clips of its video would come."""
    rows = table.take([row for row in range(table.num_rows) for _ in range(7)])
    ids = [f"{sample_id}@{index % 7}" for index, sample_id in enumerate(rows["sample_id"].to_pylist())]
    return rows.set_column(0, "sample_id", pa.array(ids))


class Mortal:
    """Part of a fake engine that dies with its process, once, after the first rows of a batch have finished."""

    def __init__(self, slots: int, lease: Path) -> None:
        super().__init__(slots)  # type: ignore[call-arg]
        self.lease = lease
        self.num_done = 0

    def step(self) -> list[Completion]:
        done: list[Completion] = super().step()  # type: ignore[misc]
        self.num_done += len(done)
        if self.num_done >= 5 and not self.lease.exists():
            self.lease.touch()
            os._exit(1)
        return done


class MortalEngine(Mortal, FakeEngine):
    """A caption engine that dies once."""


class MortalPair(FakePair):
    """Gives engines that die once in the life of the file `lease`."""

    def __init__(self, lease: Path) -> None:
        super().__init__()
        self.lease = lease

    def engine(self, slots: int) -> FakeEngine:
        return MortalEngine(slots, self.lease)


class LoadFake:
    """Loads a fake pair; with a `lease`, one that dies once."""

    def __init__(self, lease: Path | None = None) -> None:
        self.lease = lease

    def __call__(self, config: CaptionJobConfig, num_threads: int | None) -> FakePair:
        return MortalPair(self.lease) if self.lease else FakePair()


# --- whole jobs ----------------------------------------------------------------------------------------------------


class _FakeFrontEnd:
    special_tokens = ("<image>", "</s>")
    takes_videos = True
    useful_side_px = 1024


class FakePairInfo:
    """What is known of a pair that is a fake."""

    target_id = "fake"
    drafter_id = ""
    revisions: ClassVar[dict[str, str]] = {}
    front_end = _FakeFrontEnd()
    generation = Generation()


Around = Callable[[Datasource, Callable[[pa.Table], pa.Table]], tuple[Datasource, Callable[[pa.Table], pa.Table]]]


def run_fake(source: dict[str, Any], sink_path: str, prompt: str = "What?", around: Around | None = None) -> Summary:
    """Run a whole caption job in which only the pair is a fake; `around` may wrap the source and the decoding stage."""
    sections = {
        "source": source,
        "prompt": {"text": prompt},
        "model": {"target": {"path": "fake"}},
        "pool": {"slots": 4, "batch_rows": 16},
        "sink": {"path": sink_path},
        "job": {"progress": False},
    }

    def faked(
        config: CaptionJobConfig, datasource: Datasource, num_spans: int, stages: CaptionStages, run: RunContext
    ) -> Dataset:
        read, decode = around(datasource, stages.decode) if around else (datasource, stages.decode)
        return caption_dataset(config, read, num_spans, replace(stages, decode=decode, load=LoadFake()), run)

    checked = mock.patch.object(actors.loading.pair, "check", return_value=FakePairInfo())
    with checked, mock.patch.object(caption, "caption_dataset", faked):
        return caption.run(make_plan(CaptionJobConfig.model_validate_json(json.dumps(sections))))


# --- hostile inputs ------------------------------------------------------------------------------------------------

MORTAL = """
import os, signal
from pipeline.media.video import child
probe = child.probe
def crashing(path, max_pixels):
    if path.endswith("mortal.mp4"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return probe(path, max_pixels)
child.probe = crashing
child.main()
"""


def decode_mortally(table: pa.Table, decode: partial[pa.Table], peaks: Path) -> pa.Table:
    """Decode, with a decoders' process that one video ends; notes what this process has held."""
    videos = decode.keywords["options"].media
    key = (videos.decoder, videos.sampling, videos.limits)
    if key not in clips._running:
        clips.close_worker()
        clips._running[key] = DecoderWorker(*key, [sys.executable, "-c", MORTAL])
    try:
        return decode(table)
    finally:
        note_peak(peaks)


def note_peak(folder: Path) -> None:
    """Leave the largest resident size of this process, in bytes, in a file of its own."""
    status = Path("/proc/self/status").read_text()
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    (folder / str(os.getpid())).write_text(str(int(peak_kib) * 1024))


class Noted(Datasource):
    """A source of spans whose read tasks note what their process has held."""

    def __init__(self, source: Datasource, peaks: Path) -> None:
        self.source, self.peaks = source, peaks

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
