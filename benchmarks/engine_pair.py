"""The pair of the engine's benchmark, and engines over it for all methods, of one batch size and length.

Knows engines and forwards. Knows nothing of turns, references or what figures are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from actors.loading.method import build_method
from actors.loading.pair import load_target
from benchmarks.engine_tables import MODES
from benchmarks.forward_clock import ForwardClock, time_forwards
from benchmarks.peer_engine import choose_method
from benchmarks.peer_process import Work
from configs.schema import Checkpoint
from decoding import Engine, Request, Sampling
from models.kv.lanes import LaneModel
from models.target import Target


@dataclass(frozen=True)
class Cell:
    """One batch size and length: how many requests, and how often all of them."""

    batch: int
    max_new_tokens: int
    num_requests: int
    repeats: int


class Bench:
    """A loaded pair, compiled, and engines over it; `work` has the most requests and the longest outputs."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(work.threads)
        self.work = work
        self._target = self._load(work.target)
        self._drafter = self._load(work.drafter)

    def _load(self, folder: str) -> Target:
        model = load_target(Checkpoint(path=folder, dtype=self.work.dtype, device="cpu"), folder)
        model.compile()
        return model

    def requests(self, cell: Cell) -> list[Request]:
        """The first prompts."""
        sampling = Sampling(max_new_tokens=cell.max_new_tokens, ignore_eos=self.work.ignore_eos)
        texts = self.work.prompt_texts[: cell.num_requests]
        return [Request(str(number), text, sampling=sampling) for number, text in enumerate(texts)]

    def engine(self, mode: str, cell: Cell) -> tuple[Engine, ForwardClock]:
        """A fresh engine, and a clock on the forwards of its target and drafter."""
        drafter = None if mode == "plain" else self._drafter
        method = build_method(choose_method(mode, self.work.gamma), drafter, self._target)
        engine = Engine(self._target, method, cell.batch, self._max_context_tokens(cell))
        return engine, ForwardClock(_lanes_of(engine))

    def memory_bytes(self, cell: Cell) -> int:
        """Of the engines of all methods, about: the target's keys and values."""
        text: Any = self._target.decoder.config
        width = text.num_key_value_heads * text.head_dim * 2 * self._target.dtype.itemsize
        return len(MODES) * cell.batch * self._max_context_tokens(cell) * text.num_hidden_layers * width

    def _max_context_tokens(self, cell: Cell) -> int:
        return self.work.max_context_tokens - (self.work.max_new_tokens - cell.max_new_tokens)

    def forwards_ms(self, engine: Engine, batch: int, length: int) -> dict[str, float]:
        """Forwards alone over `batch` rows of `length` columns: of the target over one and γ + 1 nodes, of the drafter
        over two and one."""
        target, drafter = _lanes_of(engine)
        verified = self.work.gamma + 1
        kinds = {
            "target 1": (target, 1),
            "target γ+1": (target, verified),
            "drafter 2": (drafter, 2),
            "drafter 1": (drafter, 1),
        }
        return time_forwards(kinds, batch, length)


def _lanes_of(engine: Engine) -> list[LaneModel]:
    """The target's, and the drafter's where it has any."""
    lanes = getattr(engine.method.drafter, "lanes", None)
    return [engine._lanes, lanes] if isinstance(lanes, LaneModel) else [engine._lanes]
