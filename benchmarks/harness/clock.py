"""Measures time on a device, by CUDA events or the host's clock, and the bytes that forwards read."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from decoding.contracts import Method
from decoding.scheduling.replay import StepRunner
from models.backends.recorder import KernelRecorder, Out
from models.kv.lanes import LaneModel, SlotBatch

KINDS = ("prompts", "target", "drafter")
BytesRead = Callable[[SlotBatch, int], int]
"""Maps slots and number of nodes to the bytes that a forward reads."""
Mark = Any
"""A moment: a CUDA event, or seconds of the host's clock."""


def mark(device: torch.device) -> Mark:
    """Return the current time in the device's current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1000)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median seconds of several runs, after one untimed run."""
    run()
    marks = [mark(device)]
    for _ in range(repeats):
        run()
        marks.append(mark(device))
    wait(device)
    return statistics.median(seconds_between(start, end) for start, end in itertools.pairwise(marks))


@dataclass
class Reading:
    """Forwards of one kind: number, seconds, and a lower bound of the bytes read.

    `busy_s` is the time of CUDA graph replays and output layers alone, in which a GPU does not wait for the host; 0 if
    nothing is replayed.
    """

    calls: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    busy_s: float = 0.0


class WatchedRecorder:
    """A recorder that times replays on the device; `replayed` is called at each with what `recorded` returned."""

    def __init__(
        self,
        recorder: KernelRecorder,
        device: torch.device,
        recorded: Callable[[], Any] = lambda: None,
        replayed: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._recorded, self._replayed = recorded, replayed
        self._spans: list[tuple[Mark, Mark]] = []

    @property
    def is_recording(self) -> bool:
        return self._recorder.is_recording

    def run_beside(self, run: Callable[[], Out]) -> Out:
        """See `models.backends.recorder.KernelRecorder`."""
        return self._recorder.run_beside(run)

    def record(self, run: Callable[[], Out]) -> tuple[Out, Callable[[], None]]:
        """See `models.backends.recorder.KernelRecorder`."""
        self._recorded()
        out, replay = self._recorder.record(run)
        recorded = self._recorded()

        def watched() -> None:
            start = mark(self._device)
            replay()
            self._spans.append((start, mark(self._device)))
            self._replayed(recorded)

        return out, watched

    def take_s(self) -> float:
        """Return the seconds of all finished replays since the last call, and reset them."""
        spent = sum(seconds_between(*span) for span in self._spans)
        self._spans.clear()
        return spent


class DeviceClock:
    """Times the forwards of a target and optionally a drafter by replacing their methods.

    An output layer counts with the forward before it; prefills count as `prompts`. `watched` are the recorders of
    target and drafter, if their steps are captured. Replays of whole steps, which `runner` records, count as busy time
    of the target; their forwards have bytes and no seconds of their own.
    """

    def __init__(
        self, lanes: Sequence[LaneModel], watched: Sequence[WatchedRecorder] = (), runner: StepRunner | None = None
    ) -> None:
        self.watched = watched
        self._device = lanes[0].device
        self._spans: list[tuple[str, bool, Mark, Mark, int]] = []
        # Forwards of replayed steps: kind and bytes.
        self._replayed: list[tuple[str, int]] = []
        self._in_recording: list[tuple[str, BytesRead, int]] = []
        self._steps: WatchedRecorder | None = None
        if runner is not None and runner.recorder is not None:
            given = (self._device, self._take_recorded, self._count_replayed)
            runner.recorder = self._steps = WatchedRecorder(runner.recorder, *given)
            self._watch_slots(runner)
        for model, kind in zip(lanes, KINDS[1:], strict=False):
            self._watch(model, kind)

    def read(self) -> dict[str, Reading]:
        """Return the readings since the last call."""
        wait(self._device)
        readings = {kind: Reading() for kind in KINDS}
        for kind, is_forward, start, end, num_bytes in self._spans:
            reading, seconds = readings[kind], seconds_between(start, end)
            reading.calls += is_forward
            reading.seconds += seconds
            reading.num_bytes += num_bytes
            # Output layers are not replayed and keep the device busy.
            reading.busy_s += 0.0 if is_forward or kind == "prompts" or not self.watched else seconds
        for watched, kind in zip(self.watched, KINDS[1:], strict=False):
            readings[kind].busy_s += watched.take_s()
        for kind, num_bytes in self._replayed:
            readings[kind].calls += 1
            readings[kind].num_bytes += num_bytes
        if self._steps is not None:
            readings["target"].busy_s += self._steps.take_s()
        self._spans.clear()
        self._replayed.clear()
        return readings

    def _watch_slots(self, runner: StepRunner) -> None:
        run = runner.run

        def noted(method: Method, slots: SlotBatch, *given: Any) -> Any:
            self._slots = slots
            return run(method, slots, *given)

        runner.run = noted  # type: ignore[method-assign,assignment]

    def _take_recorded(self) -> list[tuple[str, BytesRead, int]]:
        recorded, self._in_recording = self._in_recording, []
        return recorded

    def _count_replayed(self, recorded: list[tuple[str, BytesRead, int]]) -> None:
        self._replayed += [(kind, read(self._slots, num_nodes)) for kind, read, num_nodes in recorded]

    def _watch(self, model: LaneModel, kind: str) -> None:
        latest = "prompts"
        read: BytesRead = partial(bytes_read, model, bytes_of_weights(model), bytes_of_column(model))

        def replace(name: str, as_kind: str | None, is_forward: bool) -> None:
            run = getattr(model, name)

            def timed(*given: Any, **named: Any) -> Any:
                nonlocal latest
                latest = as_kind or latest
                if self._steps is not None and self._steps.is_recording:
                    self._in_recording += [(kind, read, given[1].numel())] if name == "forward" else []
                    return run(*given, **named)
                num_bytes = read(given[0], given[1].numel()) if name == "forward" else 0
                start = mark(model.device)
                out = run(*given, **named)
                self._spans.append((latest, is_forward, start, mark(model.device), num_bytes))
                return out

            setattr(model, name, timed)

        replace("admit", "prompts", True)
        replace("forward", kind, True)
        replace("logits", None, False)


def bytes_read(model: LaneModel, weights: int, column: int, slots: SlotBatch, num_nodes: int) -> int:
    """Return a lower bound of the bytes that a forward of `num_nodes` nodes over all slots reads."""
    cached = sum(model.rows.prefix_lengths[slot] for slot in slots.ids) + sum(slots.num_generated)
    return weights + (cached + num_nodes) * column


def bytes_of_weights(model: LaneModel) -> int:
    """Return the bytes of weights that one forward reads: all but the input embeddings."""
    table = model.decoder.get_input_embeddings().weight  # type: ignore[operator]
    parameters = {id(parameter): parameter for part in (model.decoder, model.head) for parameter in part.parameters()}
    return sum(
        parameter.numel() * parameter.element_size() for parameter in parameters.values() if parameter is not table
    )


def bytes_of_column(model: LaneModel) -> int:
    """Return the bytes of keys and values of one KV position, over all layers and lanes."""
    config: Any = model.decoder.config
    parameter = next(model.decoder.parameters())
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.num_lanes
    return int(numbers * parameter.element_size())
