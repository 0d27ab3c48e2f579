"""Time on a device, and what a forward has to move: events between which a GPU worked, seconds on a CPU.

Knows `LaneModel`s and a device; no methods, and not what the times are compared with.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from models.backends.cuda.graphs import Recorder
from models.kv.lanes import LaneModel, SlotBatch


class Mark(Protocol):
    """A moment in the device's work."""

    def seconds_until(self, later: Any) -> float:
        """Between two moments that have both come."""
        ...


class CudaMark:
    """An event in the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_until(self, later: CudaMark) -> float:
        return float(self._event.elapsed_time(later._event)) / 1000


class HostMark:
    """The host's clock: on a CPU a call has ended when it returns."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_until(self, later: HostMark) -> float:
        return later._at - self._at


def mark(device: torch.device) -> Mark:
    """This moment."""
    return CudaMark() if device.type == "cuda" else HostMark()


def wait(device: torch.device) -> None:
    """Until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median of several runs, after one that is not timed."""
    run()
    marks = [mark(device)]
    for _ in range(repeats):
        run()
        marks.append(mark(device))
    wait(device)
    return statistics.median(one.seconds_until(other) for one, other in itertools.pairwise(marks))


@dataclass
class Reading:
    """Forwards of one kind: how many, how long, and the bytes that they have to read at least.

    Between the events around a forward a GPU may wait for the host; `busy_s` are replays and output layers alone, in
    which it never does. 0 where nothing is replayed.
    """

    calls: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    busy_s: float = 0.0


KINDS = ("prompts", "target", "drafter")


class WatchedRecorder:
    """A recorder whose replays are timed on the device."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder = recorder
        self._device = device
        self._spans: list[tuple[Mark, Mark]] = []

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See `models.backends.cuda.graphs.Recorder`."""
        out, replay = self._recorder.record(run)

        def watched() -> None:
            start = mark(self._device)
            replay()
            self._spans.append((start, mark(self._device)))

        return out, watched

    def take_s(self) -> float:
        """Seconds of all replays since the last time, which are over."""
        spent = sum(start.seconds_until(end) for start, end in self._spans)
        self._spans.clear()
        return spent


@dataclass
class DeviceClock:
    """Adds up the forwards of a target, first, and a drafter; from its making on it stands between them and the engine.

    Output layers belong to the forward before them, prompts are a kind of their own. `watched` are what records the
    steps of each, where anything does.
    """

    lanes: Sequence[LaneModel]
    watched: Sequence[WatchedRecorder] = ()
    _spans: list[tuple[str, bool, Mark, Mark, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for model, kind in zip(self.lanes, KINDS[1:], strict=False):
            self._stand_before(model, kind)

    def read(self) -> dict[str, Reading]:
        """What was added up since the last time."""
        wait(self.lanes[0].device)
        found = {kind: Reading() for kind in KINDS}
        for kind, is_forward, start, end, num_bytes in self._spans:
            one = found[kind]
            one.calls += is_forward
            one.seconds += start.seconds_until(end)
            one.num_bytes += num_bytes
        for watched, (kind, one) in zip(self.watched, list(found.items())[1:], strict=False):
            heads = (span for span in self._spans if span[0] == kind and not span[1])
            one.busy_s = watched.take_s() + sum(start.seconds_until(end) for _, _, start, end, _ in heads)
        self._spans.clear()
        return found

    def _stand_before(self, model: LaneModel, kind: str) -> None:
        weights = bytes_of_weights(model)
        column = bytes_of_column(model)
        admit, forward, logits = model.admit, model.forward, model.logits
        latest = "prompts"

        def timed(run: Callable[..., Any], own: str, is_forward: bool, num_bytes: int, given: Any, named: Any) -> Any:
            start = mark(model.device)
            out = run(*given, **named)
            self._spans.append((own, is_forward, start, mark(model.device), num_bytes))
            return out

        def timed_admit(*given: Any, **named: Any) -> Any:
            nonlocal latest
            latest = "prompts"
            return timed(admit, latest, True, 0, given, named)

        def timed_forward(slots: SlotBatch, tokens: Any, *given: Any, **named: Any) -> Any:
            nonlocal latest
            latest = kind
            held = sum(model._prefix_lengths[slot] for slot in slots.ids) + sum(slots.num_generated)
            columns = held + tokens.numel()
            return timed(forward, kind, True, weights + columns * column, (slots, tokens, *given), named)

        def timed_logits(*given: Any, **named: Any) -> Any:
            return timed(logits, latest, False, 0, given, named)

        # Methods of this one memory.
        setattr(model, "admit", timed_admit)  # noqa: B010
        setattr(model, "forward", timed_forward)  # noqa: B010
        setattr(model, "logits", timed_logits)  # noqa: B010


def bytes_of_weights(model: LaneModel) -> int:
    """What one forward reads of the weights: all but the input table, of which it takes a few rows."""
    table = model.decoder.get_input_embeddings().weight  # type: ignore[operator]
    held = {id(one): one for part in (model.decoder, model.head) for one in part.parameters()}
    return sum(one.numel() * one.element_size() for one in held.values() if one is not table)


def bytes_of_column(model: LaneModel) -> int:
    """Keys and values of one column of a slot, all layers and lanes together."""
    config: Any = model.decoder.config
    parameter = next(model.decoder.parameters())
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.num_lanes
    return int(numbers * parameter.element_size())
