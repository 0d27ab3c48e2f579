"""Stand-ins that travel to Ray's workers: a source of rows in memory, and a pair that can kill its own process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from configs.schema import CaptionJob
from decoding.types import Completion
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
