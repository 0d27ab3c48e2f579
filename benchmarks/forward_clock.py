"""How long forwards take: those inside an engine while it decodes, and forwards alone beside it.

Knows `LaneModel`s and a clock; no methods, and not what the times are compared with. On a CPU a forward has ended when
its call returns, so the clock of the host is enough.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from models.kv.lanes import LaneModel, SlotBatch

MAX_FORWARDS, MIN_FORWARDS = 25, 3
"""Timed forwards of each kind; their medians count."""
ENOUGH_S = 2.0
"""After so long no more than the fewest are timed."""


class ForwardClock:
    """Adds up the time that `lanes` spend in forwards, output layers included: of prompts, and of steps.

    From its making on it stands between the engine and these lanes.
    """

    def __init__(self, lanes: Sequence[LaneModel]) -> None:
        self.prompts_s = 0.0
        self.steps_s = 0.0
        self._in_prompt = False
        for one in lanes:
            # An output layer that is asked for after a prompt belongs to the prompt.
            for name, in_prompt in (("admit", True), ("forward", False), ("logits", None)):
                setattr(one, name, self._timed(getattr(one, name), in_prompt))

    def _timed(self, run: Callable[..., Any], in_prompt: bool | None) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if in_prompt is not None:
                self._in_prompt = in_prompt
            start = time.perf_counter()
            out = run(*arguments, **named)
            spent = time.perf_counter() - start
            if self._in_prompt:
                self.prompts_s += spent
            else:
                self.steps_s += spent
            return out

        return timed


@torch.inference_mode()
def time_forwards(kinds: Mapping[str, tuple[LaneModel, int]], batch: int, length: int) -> dict[str, float]:
    """Milliseconds of forwards with their output layers, over so many nodes for each of `batch` rows that hold
    `length`; the median of each kind.

    The kinds take turns, so that a machine that changes its pace changes it for all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in kinds}
    began_s = time.perf_counter()
    for turn in range(MAX_FORWARDS):
        if turn >= MIN_FORWARDS and time.perf_counter() - began_s > ENOUGH_S:
            break
        for name, (lanes, num_nodes) in kinds.items():
            times[name].append(_time_forward(lanes, batch, num_nodes, length))
    return {name: statistics.median(each) for name, each in times.items()}


def _time_forward(lanes: LaneModel, batch: int, num_nodes: int, length: int) -> float:
    slots = SlotBatch(torch.arange(batch), tuple(range(batch)), (0,) * batch)
    lanes.cache.lens[:batch] = length
    lanes._prefix_lengths[:batch] = [length] * batch
    tokens = torch.full((batch, num_nodes), 5)
    depth = torch.arange(num_nodes).expand(batch, -1)
    visible = torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril().expand(batch, -1, -1)
    start = time.perf_counter()
    lanes.logits(lanes.forward(slots, tokens, depth, visible))
    return 1000 * (time.perf_counter() - start)
