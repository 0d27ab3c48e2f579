"""Simulates long contexts: KV caches with random visual positions, and acceptance at a forced rate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness.engines import count_tokens
from decoding import Engine, Request
from decoding.acceptance.walk import target_choice
from decoding.contracts import Acceptance, VerificationOutput
from decoding.noise import Stream
from decoding.tree import AcceptanceResult
from models.kv.feature_layers import LAST
from models.kv.lanes import LaneModel
from models.target import Target

SEED = 0


class Forced(Acceptance):
    """Accept each draft of a chain with probability `rate`; the first rejected draft ends the path.

    The draws use stream RULE, so they are the same for every chain length and drafter. The token after the last
    accepted draft is the target's. No job can choose this rule. Raises ValueError if the rate is not a probability, or
    a tree is not a chain.
    """

    lossless = False

    def __init__(self, rate: float) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"the acceptance rate must be between 0 and 1, not {rate}")
        self.rate = rate

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        tree = verification.tree
        if not tree.is_chain:
            raise ValueError("acceptance can be forced for chains only")
        choice = target_choice(verification)
        draws = verification.noise.uniform(Stream.RULE)[:, : tree.num_levels]
        taken = (draws < self.rate) & tree.valid[:, 1:]
        n = 1 + taken.long().cumprod(dim=1).sum(dim=1)
        index = torch.arange(tree.num_levels + 1, device=n.device)
        path = torch.where(index < n[:, None], index, 0)
        expected = torch.cat([tree.tokens[:, :1], choice[:, :-1]], dim=1)
        relaxed = (path > 0) & (tree.tokens != expected)
        return AcceptanceResult(path, n, choice.gather(1, (n - 1)[:, None])[:, 0], relaxed)


class Filled:
    """A model whose rows hold `num_columns` random KV positions after their prompt.

    All engines of this model share one KV cache, so only one of them may run at a time.
    """

    def __init__(self, model: Target, num_columns: int, num_slots: int, capacity: int) -> None:
        self._model = model
        self._num_columns = num_columns
        self._lanes = model.lanes(num_slots, 1, capacity + num_columns)
        self._is_filled = False
        self._admit = self._lanes.admit
        setattr(self._lanes, "admit", self.admit)  # noqa: B010

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def lanes(
        self,
        num_slots: int,
        num_lanes: int,
        capacity: int,
        feature_layers: Sequence[int] = (LAST,),
        num_pages: int | None = None,
    ) -> LaneModel:
        """Return the shared lanes, which have no pages; raise ValueError if their cache is too small or lacks a feature
        layer."""
        cache = self._lanes.cache
        if set(feature_layers) - {LAST}:
            raise ValueError(f"the shared cache has the last state only, not the feature layers {feature_layers}")
        if (
            num_pages is not None
            or num_lanes != 1
            or num_slots > cache.num_rows
            or capacity + self._num_columns > cache.capacity
        ):
            raise ValueError(f"{num_slots} slots of {capacity} columns do not fit into the shared cache")
        return self._lanes

    def admit(self, slots: Any, prefixes: Any, *options: Any, **named: Any) -> Any:
        """Run `LaneModel.admit`, then mark the random positions as cached."""
        cache = self._lanes.cache
        if not self._is_filled:
            # The first forward allocates the cache; it stays filled afterwards, so nothing may zero it.
            self._admit(slots, prefixes, *options, **named)
            for memory in (*cache.keys, *cache.values):
                assert memory is not None
                noise = torch.randn(memory.shape[2:], generator=torch.Generator().manual_seed(SEED))
                memory.copy_(noise.to(memory.dtype))
            setattr(cache, "zero", lambda *_: None)  # noqa: B010
            self._is_filled = True
        prefill = self._admit(slots, prefixes, *options, **named)
        cache.lens[self._lanes.rows.of(slots)] += self._num_columns
        for slot in slots.ids:
            self._lanes.rows.prefix_lengths[slot] += self._num_columns
        return prefill


def time_steps(
    engine: Engine, requests: Sequence[Request], num_steps: int, num_warm: int = 1, enough_s: float = float("inf")
) -> tuple[float, int, int]:
    """Return seconds, number and total tokens of timed steps, after `num_warm` steps that admit and compile.

    Stops after `num_steps`, or after `enough_s` and at least four steps; raises RuntimeError if a row ends before.
    """
    for request in requests:
        engine.submit(request)
    ended = [completion for _ in range(num_warm) for completion in engine.step()]
    before, num_done, seconds = count_tokens(engine), 0, 0.0
    start = time.perf_counter()
    while not ended and num_done < num_steps and (num_done < 4 or seconds < enough_s):
        ended = engine.step()
        num_done += 1
        seconds = time.perf_counter() - start
    if ended:
        raise RuntimeError(f"{ended[0].sample_id} ended while steps were timed: {ended[0].error or 'no room left'}")
    return seconds, num_done, count_tokens(engine) - before
