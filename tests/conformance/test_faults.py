"""Planted faults: each must make its check fail.

The checks are those of the other conformance tests. Every fault has occurred in an engine of this kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import decoding.acceptance.rejection as rejection
import decoding.engine as engine
import decoding.scheduling.slots as slots_module
import decoding.step as step
import models.backends.base as base
from decoding import Sampling
from decoding.acceptance import Rejection
from decoding.drafters import ModelDrafter
from decoding.noise import Noise
from decoding.scheduling.slots import RequestState, SlotTable
from models.backends.cache import RaggedCache
from models.kv.lanes import LaneModel
from tests.conformance import checks, planted
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow

PENALISED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)


def rotary_position_by_node_instead_of_depth(patch: Patch) -> None:
    forward = LaneModel.forward

    def by_node(self: Any, slots: Any, tokens: Tensor, depth: Tensor, *rest: Any, **more: Any) -> Tensor:
        return forward(self, slots, tokens, torch.arange(tokens.shape[1]).expand_as(depth), *rest, **more)

    patch.setattr(LaneModel, "forward", by_node)


def siblings_see_each_other(patch: Patch) -> None:
    forward = LaneModel.forward

    def everything_before(
        self: Any, slots: Any, tokens: Tensor, depth: Tensor, visible: Tensor, *rest: Any, **more: Any
    ) -> Tensor:
        return forward(self, slots, tokens, depth, torch.ones_like(visible).tril(), *rest, **more)

    patch.setattr(LaneModel, "forward", everything_before)


def mask_lets_stale_columns_through(patch: Patch) -> None:
    mask = base.tree_mask
    patch.setattr(base, "tree_mask", lambda lens, visible, window: mask(lens + 1, visible, window))


def commit_goes_to_the_wrong_row(patch: Patch) -> None:
    compact = RaggedCache.compact
    patch.setattr(RaggedCache, "compact", lambda self, rows, *rest: compact(self, rows.flip(0), *rest))


def drafter_omits_the_accepted_leaf(patch: Patch) -> None:
    commit = ModelDrafter.commit

    def forget(self: Any, verification: Any, result: Any) -> None:
        commit(self, verification, result)
        self._pending[verification.slots.index, 0] = result.next
        self._num_pending[verification.slots.index] = 1

    patch.setattr(ModelDrafter, "commit", forget)


def drafter_keeps_refused_columns(patch: Patch) -> None:
    commit = ModelDrafter.commit

    def keep(self: Any, verification: Any, result: Any) -> None:
        commit(self, verification, result)
        self.lanes.cache.lens[verification.slots.index] += (result.n == 1).long()

    patch.setattr(ModelDrafter, "commit", keep)


def refill_keeps_the_old_seen_tokens(patch: Patch) -> None:
    occupy = SlotTable.occupy

    def stale(self: Any, *args: Any) -> None:
        before = None if self._seen is None else self._seen.clone()
        occupy(self, *args)
        if before is not None:
            self._seen |= before

    patch.setattr(SlotTable, "occupy", stale)


def eos_inside_the_path_is_overrun(patch: Patch) -> None:
    take = RequestState.take

    def overrun(self: RequestState, tokens: Any, logprobs: Any, eos_ids: Any, decode: Any) -> int:
        only_last = eos_ids if tokens[-1] in eos_ids else frozenset()
        return take(self, tokens, logprobs, only_last, decode)

    patch.setattr(RequestState, "take", overrun)


def noise_is_keyed_by_slot(patch: Patch) -> None:
    patch.setattr(
        SlotTable,
        "noise",
        lambda self, slots: Noise(torch.stack([slots.index, slots.index], 1), self._position[slots.index]),
    )


def a_finished_row_is_dropped(patch: Patch) -> None:
    whole = engine.Engine.step
    patch.setattr(engine.Engine, "step", lambda self: [c for c in whole(self) if c.sample_id != "sample-3"])


def top_p_keeps_one_token_too_few(patch: Patch) -> None:
    warp = step.process_logits

    def greedy_filter(logits: Tensor, rows: Any, *rest: Any) -> Tensor:
        out = warp(logits, rows, *rest)
        kept = out > -torch.inf
        lowest = out.masked_fill(~kept, torch.inf).argmin(-1, keepdim=True)
        several = kept.sum(-1, keepdim=True) > 1
        return torch.where(several, out.scatter(-1, lowest, -torch.inf), out)

    patch.setattr(step, "process_logits", greedy_filter)


def residual_is_the_targets_own_distribution(patch: Patch) -> None:
    patch.setattr(rejection, "normalise", lambda mass, fallback: fallback)


def stop_string_is_left_in_the_text(patch: Patch) -> None:
    patch.setattr(slots_module, "_cut_at_stop", lambda text, stop: text if any(s in text for s in stop) else None)


def greedy(tree: str = "ragged", drafter: str = "perturbed") -> Callable[[], object]:
    return lambda: checks.check_greedy("llava", tree, drafter, 4)


def sampled(sampling: Sampling = PENALISED, drafter: str = "perturbed") -> Callable[[], object]:
    return lambda: checks.check_sampled("llava", "branching", drafter, 4, sampling, count=18)


def rejection_fits(tree: str) -> Callable[[], object]:
    def check() -> None:
        assert checks.joint_of_two_tokens(checks.TREES[tree], Rejection(), 3000, "loose") < 2.1

    return check


FAULTS: list[planted.Fault] = [
    (rotary_position_by_node_instead_of_depth, greedy()),
    (siblings_see_each_other, greedy()),
    (mask_lets_stale_columns_through, greedy()),
    (commit_goes_to_the_wrong_row, greedy()),
    (drafter_omits_the_accepted_leaf, greedy("chain", "right")),
    (drafter_keeps_refused_columns, lambda: checks.check_cache("llama", "chain", "perturbed")),
    (refill_keeps_the_old_seen_tokens, sampled()),
    (eos_inside_the_path_is_overrun, lambda: checks.check_eos_at_every_depth("llama", "chain")),
    (noise_is_keyed_by_slot, lambda: checks.check_independence("llava", "chain", PENALISED)),
    (a_finished_row_is_dropped, greedy()),
    (top_p_keeps_one_token_too_few, sampled()),
    (residual_is_the_targets_own_distribution, rejection_fits("chain")),
    (stop_string_is_left_in_the_text, lambda: checks.check_stop_strings("llama")),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
