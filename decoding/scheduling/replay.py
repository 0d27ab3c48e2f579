"""Replays steps as recordings: CUDA graphs of whole steps, in place of launching their kernels one by one.

A step of a small model, or of a tree, launches hundreds of small kernels; the host then takes longer than the device. A
step is recorded for a few numbers of slots and depths: it has spare slots and invalid drafts up to these. Before the
first step, all of them are recorded for rows that are sampled as those of the first step; a step with another key is
recorded if it recurs. The key holds all that the kernels depend on besides device memory: number of slots and levels,
and the host state of the method's parts. A recording reads and writes the state of slots and KV caches in place. Parts
without a key, and rows with a grammar, are not recorded.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoding.contracts import Method
from decoding.sampling import RowSampling
from decoding.scheduling.slots import SlotTable
from decoding.step import StepOutput, StepResult, run_step
from decoding.types import Sampling
from models.backends.host_copy import pack
from models.backends.layers import first_lines
from models.backends.recorder import SIZES, whole_step
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
    """A recorded step: its slots and output, which every replay reads and writes in place, and the number of drafter
    forwards."""

    slots: SlotBatch
    output: StepOutput
    packed: Tensor
    num_forwards: int
    replay: Callable[[], None]

    def fill(self, slots: SlotBatch) -> None:
        """Set the slots of the next replay, as many as were recorded."""
        assert self.slots.is_active is not None
        assert slots.is_active is not None
        self.slots.index.copy_(slots.index)
        self.slots.is_active.copy_(slots.is_active)


class StepRunner:
    """Runs the steps of one engine: replays those with a recording, launches the others.

    Steps are recorded only if the target's forwards are. If a recording fails, a warning is logged and all later steps
    are launched. It may have changed host state before the step runs again, see `Drafter.replay_key`.
    """

    def __init__(self, lanes: LaneModel, table: SlotTable, method: Method) -> None:
        self.lanes, self.table = lanes, table
        self.recorder = lanes.backend.step_recorder(lanes.device) if lanes.is_captured else None
        self._recordings: dict[Key, Recording] = {}
        self._counts: Counter[Key] = Counter()
        num_slots, most = len(table.progress), method.tree.max_levels if method.drafter.name != "none" else 0
        self._sizes = sorted({min(size, num_slots) for size in SIZES})
        self._depths = sorted({0, most, (most + 1) // 2 if method.controller.can_be_off else 0})
        self._limit = torch.zeros((), dtype=torch.long, device=lanes.device)
        self.records_ahead = self.recorder is not None

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def run(self, method: Method, slots: SlotBatch, rows: RowSampling, num_levels: int) -> StepResult:
        """Run `decoding.step.run_step`; all steps have the same `method`. A replayed step counts as verification; its
        trees may be deeper than `num_levels`, but have no valid drafts below."""
        if self.recorder is None or len(slots.ids) > self._sizes[-1]:
            return run_step(method, self.lanes, self.table, slots, rows, num_levels)
        size = next(size for size in self._sizes if size >= len(slots.ids))
        depth = next(depth for depth in self._depths if depth >= num_levels)
        if (key := self._key_of(method, slots, size, rows, depth)) is None:
            return run_step(method, self.lanes, self.table, slots, rows, num_levels)
        slots = self.table.padded(slots, size)
        self._limit.fill_(num_levels)
        if key in self._recordings:
            return self._replay(self._recordings[key], method, slots, depth)
        if len(self._counts) == MAX_KEYS:
            self._counts.clear()
        self._counts[key] += 1
        run = self._step(method, slots, rows, depth)
        if len(self._recordings) == MAX_RECORDINGS:
            return run()
        if self._counts[key] < NUM_LAUNCHED:
            return replace(run(), is_warm_up=True)
        if self._counts[key] == NUM_LAUNCHED:
            with whole_step():
                return replace(self.recorder.run_beside(run), is_warm_up=True)
        if (recording := self._record(method, slots, rows, depth)) is None:
            return run()
        self._recordings[key] = recording
        return replace(self._replay(recording, method, slots, depth), is_warm_up=True)

    def record_ahead(self, method: Method, samplings: Sequence[Sampling]) -> None:
        """Record the steps of all sizes and depths for rows with `samplings`, the largest first, before the first
        request has a slot."""
        self.records_ahead = False
        self.lanes.allocate()
        method.drafter.allocate()
        rows = self.table.rows_of(samplings)
        for size in reversed(self._sizes):
            for depth in reversed(self._depths):
                slots = self.table.padded(SlotBatch(self.table.root[:0], (), ()), size)
                key = self._key_of(method, slots, size, rows, depth)
                if self.recorder is None or key is None or len(self._recordings) >= MAX_RECORDINGS:
                    continue
                with whole_step():
                    self.recorder.run_beside(self._step(method, slots, rows, depth))
                # The first run may have allocated memory that a recording needs.
                key = self._key_of(method, slots, size, rows, depth)
                if key is not None and (recording := self._record(method, slots, rows, depth)) is not None:
                    self._recordings[key] = recording

    def _replay(self, recording: Recording, method: Method, slots: SlotBatch, depth: int) -> StepResult:
        """Run the kernels of a recording on `slots`."""
        started = time.perf_counter()
        recording.fill(slots)
        recording.replay()
        method.drafter.count_forwards(recording.num_forwards)
        method.drafter.replayed(slots, depth)
        return StepResult(recording.output, started, started, time.perf_counter(), recording.packed)

    def _step(self, method: Method, slots: SlotBatch, rows: RowSampling, depth: int) -> Callable[[], StepResult]:
        """Return a step of trees with `depth` levels, of which the first `_limit` have valid drafts."""
        return lambda: run_step(
            method, self.lanes, self.table, slots, self.table.read_again(slots, rows), depth, self._limit
        )

    def _key_of(self, method: Method, slots: SlotBatch, size: int, rows: RowSampling, depth: int) -> Key | None:
        """Return the key of a step, None if it cannot be recorded."""
        if self.table.constraints.applies(slots.ids):
            return None
        num_nodes = method.tree.max_nodes if depth else 1
        if size * num_nodes * self.lanes.num_lanes * self.table.vocab_size > MAX_LOGITS:
            return None
        parts = (
            self.lanes.replay_key(slots),
            method.drafter.replay_key(slots, depth),
            method.tree.replay_key(slots),
            method.acceptance.replay_key(slots),
        )
        if None in parts:
            return None
        return (size, depth, rows.replay_key(), self.table.replay_key(), *parts)

    def _record(self, method: Method, slots: SlotBatch, rows: RowSampling, depth: int) -> Recording | None:
        """Record a step without running it; None if it cannot be recorded."""
        assert self.recorder is not None
        assert slots.is_active is not None
        before = method.drafter.num_forwards
        fixed = replace(slots, index=slots.index.clone(), is_active=slots.is_active.clone())

        def step() -> tuple[StepOutput, Tensor]:
            output = self._step(method, fixed, rows, depth)().output
            return output, pack(output)

        try:
            with whole_step():
                (output, packed), replay = self.recorder.record(step)
        except Exception as error:  # failed captures have no common type, and change nothing on the device
            logger.warning(
                "steps are launched kernel by kernel, which is slower: this method cannot be recorded: %s",
                first_lines(error, 1),
            )
            self.recorder = None
            return None
        finally:
            # Nothing ran: replays count their forwards.
            num_forwards = method.drafter.num_forwards - before
            method.drafter.count_forwards(-num_forwards)
        return Recording(fixed, output, packed, num_forwards, replay)
