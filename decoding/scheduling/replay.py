"""Replays steps as recordings: CUDA graphs of whole steps, in place of launching their kernels one by one.

A step of a small model, or of a tree, launches hundreds of small kernels; the host then takes longer than the device. A
step whose key recurs is recorded. Its key holds all that its kernels depend on besides device memory: the number of
rows and levels, and the host state of the method's parts. A recording reads and writes the state of slots and KV caches
in place. Parts without a key, and rows with a grammar, are not recorded.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from decoding.contracts import Method
from decoding.sampling import RowSampling
from decoding.scheduling.slots import SlotTable
from decoding.step import StepOutput, StepResult, run_step
from models.backends.host_copy import pack
from models.backends.layers import first_lines
from models.kv.lanes import LaneModel, SlotBatch

logger = logging.getLogger(__name__)

NUM_LAUNCHED = 3
"""Steps of one key that are launched kernel by kernel before the next one is recorded. The last runs on the recorder's
stream, where libraries allocate workspaces. Fewer than a controller's first measurement has steps."""
MAX_RECORDINGS = 64
"""Maximum number of recordings of an engine; steps of further keys are launched."""
MAX_KEYS = 4096
"""Maximum number of keys that are counted; then the counts start again."""
MAX_LOGITS = 1 << 27
"""Maximum logits of a recorded step, 512 MiB in fp32: a recording keeps the memory of a step. The kernels of larger
steps take longer than their launches."""

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Recording:
    """A recorded step: its slot numbers (b,) and output, which every replay reads and writes in place, and the number
    of drafter forwards."""

    index: Tensor
    output: StepOutput
    packed: Tensor
    num_forwards: int
    replay: Callable[[], None]


class StepRunner:
    """Runs the steps of one engine: replays those with a recording, launches the others.

    Steps are recorded only if the target's forwards are. If a recording fails, a warning is logged and all later steps
    are launched. It may have changed host state before the step runs again, see `Drafter.replay_key`.
    """

    def __init__(self, lanes: LaneModel, table: SlotTable) -> None:
        self.lanes, self.table = lanes, table
        self.recorder = lanes.backend.step_recorder(lanes.device) if lanes.is_captured else None
        self._recordings: dict[Key, Recording] = {}
        self._counts: Counter[Key] = Counter()

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def run(self, method: Method, slots: SlotBatch, rows: RowSampling, num_levels: int) -> StepResult:
        """Run `decoding.step.run_step`; all steps have the same `method`. A replayed step counts as verification."""
        run = partial(run_step, method, self.lanes, self.table, slots, rows, num_levels)
        if self.recorder is None:
            return run()
        self.lanes.prepare_replay(slots)
        method.drafter.prepare_replay(slots, num_levels)
        if (key := self._key_of(method, slots, rows, num_levels)) is None:
            return run()
        if (recording := self._recordings.get(key)) is not None:
            started = time.perf_counter()
            if not slots.are_leading:
                recording.index.copy_(slots.index)
            recording.replay()
            method.drafter.count_forwards(recording.num_forwards)
            method.drafter.replayed(slots, num_levels)
            return StepResult(recording.output, started, started, time.perf_counter(), recording.packed)
        if len(self._counts) == MAX_KEYS:
            self._counts.clear()
        self._counts[key] += 1
        if len(self._recordings) == MAX_RECORDINGS:
            return run()
        if self._counts[key] > NUM_LAUNCHED:
            return self._record(key, method, slots, rows, num_levels)
        launched = self.recorder.run_beside(run) if self._counts[key] == NUM_LAUNCHED else run()
        return replace(launched, is_warm_up=True)

    def _key_of(self, method: Method, slots: SlotBatch, rows: RowSampling, num_levels: int) -> Key | None:
        """Return the key of a step, None if it cannot be recorded."""
        if self.table.constraints.applies(slots.ids):
            return None
        num_nodes = method.tree.max_nodes if num_levels else 1
        if len(slots.ids) * num_nodes * self.lanes.num_lanes * self.table.vocab_size > MAX_LOGITS:
            return None
        parts = (
            self.lanes.replay_key(slots),
            method.drafter.replay_key(slots, num_levels),
            method.tree.replay_key(slots),
            method.acceptance.replay_key(slots),
        )
        if None in parts:
            return None
        table = self.table.replay_key()
        return (len(slots.ids), slots.are_leading, num_levels, rows.replay_key(), table, *parts)

    def _record(
        self,
        key: Key,
        method: Method,
        slots: SlotBatch,
        rows: RowSampling,
        num_levels: int,
    ) -> StepResult:
        """Record a step and replay it once; launch it if it cannot be recorded."""
        assert self.recorder is not None
        started, before = time.perf_counter(), method.drafter.num_forwards
        recorded_slots = replace(slots, index=slots.index.clone())

        def step() -> tuple[StepOutput, Tensor]:
            read = self.table.read_again(recorded_slots, rows)
            output = run_step(method, self.lanes, self.table, recorded_slots, read, num_levels).output
            return output, pack(output)

        try:
            (output, packed), replay = self.recorder.record(step)
        except Exception as error:  # failed captures have no common type, and change nothing on the device
            logger.warning(
                "steps are launched kernel by kernel, which is slower: this method cannot be recorded: %s",
                first_lines(error, 1),
            )
            self.recorder = None
            method.drafter.count_forwards(before - method.drafter.num_forwards)
            return run_step(method, self.lanes, self.table, slots, rows, num_levels)
        self._recordings[key] = Recording(
            recorded_slots.index, output, packed, method.drafter.num_forwards - before, replay
        )
        replay()
        return StepResult(output, started, started, time.perf_counter(), packed, is_warm_up=True)
