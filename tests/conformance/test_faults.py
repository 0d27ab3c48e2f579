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
import decoding.drafters.model as drafter_model
import decoding.engine as engine
import decoding.scheduling.slots as slots_module
import decoding.step as step
import models.backends.base as base
from decoding import Sampling
from decoding.acceptance import Rejection
from decoding.contracts import StepNoise
from decoding.drafters import ModelDrafter
from decoding.noise import Noise, Stream
from decoding.scheduling.slots import Progress, SlotTable
from models.backends.cache import RaggedCache
from models.kv.lanes import LaneModel
from tests.conformance import checks

Patch = pytest.MonkeyPatch
PENALISED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)


def rotary_position_one_too_far(patch: Patch) -> None:
    forward = LaneModel.forward

    def later(self: Any, slots: Any, tokens: Tensor, depth: Tensor, *rest: Any, **more: Any) -> Tensor:
        return forward(self, slots, tokens, depth + 1, *rest, **more)

    patch.setattr(LaneModel, "forward", later)


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


def accepted_columns_are_not_moved(patch: Patch) -> None:
    patch.setattr(RaggedCache, "compact", lambda *_: None)


def commit_goes_to_the_wrong_row(patch: Patch) -> None:
    compact = RaggedCache.compact
    patch.setattr(RaggedCache, "compact", lambda self, rows, *rest: compact(self, rows.flip(0), *rest))


def commit_forgets_the_root(patch: Patch) -> None:
    commit = LaneModel.commit
    patch.setattr(LaneModel, "commit", lambda self, s, source, keep: commit(self, s, source, (keep - 1).clamp_min(1)))


def drafter_forgets_the_accepted_leaf(patch: Patch) -> None:
    commit = ModelDrafter.commit

    def forget(self: Any, judgement: Any, verdict: Any) -> None:
        commit(self, judgement, verdict)
        self._pending[judgement.slots.index, 0] = verdict.next
        self._num_pending[judgement.slots.index] = 1

    patch.setattr(ModelDrafter, "commit", forget)


def drafter_keeps_refused_columns(patch: Patch) -> None:
    commit = ModelDrafter.commit

    def keep(self: Any, judgement: Any, verdict: Any) -> None:
        commit(self, judgement, verdict)
        self.lanes.cache.lens[judgement.slots.index] += (verdict.n == 1).long()

    patch.setattr(ModelDrafter, "commit", keep)


def refill_keeps_the_old_length(patch: Patch) -> None:
    admit = LaneModel.admit

    def stale(self: Any, *args: Any, **options: Any) -> Any:
        before = self.cache.lens.clone()
        out = admit(self, *args, **options)
        self.cache.lens.copy_(torch.where(before > 0, before, self.cache.lens))
        return out

    patch.setattr(LaneModel, "admit", stale)


def refill_keeps_the_old_seen_tokens(patch: Patch) -> None:
    occupy = SlotTable.occupy

    def stale(self: Any, *args: Any) -> None:
        before = None if self._seen is None else self._seen.clone()
        occupy(self, *args)
        if before is not None:
            self._seen |= before

    patch.setattr(SlotTable, "occupy", stale)


def eos_inside_the_path_is_overrun(patch: Patch) -> None:
    take = Progress.take

    def overrun(self: Progress, tokens: Any, logprobs: Any, eos_ids: Any, decode: Any) -> int:
        only_last = eos_ids if tokens[-1] in eos_ids else frozenset()
        return take(self, tokens, logprobs, only_last, decode)

    patch.setattr(Progress, "take", overrun)


def penalty_forgets_the_nodes_ancestors(patch: Patch) -> None:
    warp = step.warp
    patch.setattr(step, "warp", lambda logits, rows, *_: warp(logits, rows, None))


def noise_is_keyed_by_slot(patch: Patch) -> None:
    patch.setattr(
        SlotTable,
        "noise",
        lambda self, slots: Noise(torch.stack([slots.index, slots.index], 1), self._position[slots.index]),
    )


def noise_forgets_the_position(patch: Patch) -> None:
    patch.setattr(SlotTable, "noise", lambda self, s: Noise(self._keys[s.index], torch.zeros_like(s.index)))


def a_finished_row_is_dropped(patch: Patch) -> None:
    whole = engine.Engine.step
    patch.setattr(engine.Engine, "step", lambda self: [c for c in whole(self) if c.sample_id != "sample-3"])


def top_p_keeps_one_token_too_few(patch: Patch) -> None:
    warp = step.warp

    def greedy_filter(logits: Tensor, rows: Any, *rest: Any) -> Tensor:
        out = warp(logits, rows, *rest)
        kept = out > -torch.inf
        lowest = out.masked_fill(~kept, torch.inf).argmin(-1, keepdim=True)
        several = kept.sum(-1, keepdim=True) > 1
        return torch.where(several, out.scatter(-1, lowest, -torch.inf), out)

    patch.setattr(step, "warp", greedy_filter)


def residual_is_the_targets_own_distribution(patch: Patch) -> None:
    patch.setattr(rejection, "normalise", lambda mass, fallback: fallback)


def residual_reuses_the_drafts_noise(patch: Patch) -> None:
    gumbel = StepNoise.gumbel
    patch.setattr(StepNoise, "gumbel", lambda self, s: gumbel(self, Stream.DRAFT if s is Stream.RESIDUAL else s))


def second_sibling_is_judged_by_the_unreduced_draft(patch: Patch) -> None:
    one_hot = rejection.F.one_hot

    def forget(index: Tensor, size: int) -> Tensor:
        out = one_hot(index, size)
        return torch.zeros_like(out) if index.dim() == 1 and forget.armed else out  # type: ignore[attr-defined]

    forget.armed = False  # type: ignore[attr-defined]
    judge = Rejection.judge
    target_probs = Rejection._target_probs

    def probs(judgement: Any, nodes: Tensor) -> Tensor:
        forget.armed = False  # type: ignore[attr-defined]
        out = target_probs(judgement, nodes)
        forget.armed = True  # type: ignore[attr-defined]
        return out

    patch.setattr(rejection.F, "one_hot", forget)
    patch.setattr(Rejection, "_target_probs", staticmethod(probs))
    patch.setattr(Rejection, "judge", judge)


def catch_up_runs_one_token_only(patch: Patch) -> None:
    patch.setattr(
        drafter_model.ModelDrafter,
        "_catch_up",
        _wrong_last(drafter_model.ModelDrafter._catch_up),
    )


def _wrong_last(catch_up: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(self: Any, slots: Any) -> Tensor:
        self._num_pending[slots.index] = 1
        return catch_up(self, slots)

    return wrong


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


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (rotary_position_one_too_far, greedy("chain")),
    (rotary_position_by_node_instead_of_depth, greedy()),
    (siblings_see_each_other, greedy()),
    (mask_lets_stale_columns_through, greedy()),
    (accepted_columns_are_not_moved, greedy()),
    (commit_goes_to_the_wrong_row, greedy()),
    (commit_forgets_the_root, greedy("chain", "right")),
    (drafter_forgets_the_accepted_leaf, greedy("chain", "right")),
    (catch_up_runs_one_token_only, greedy("chain", "right")),
    (drafter_keeps_refused_columns, lambda: checks.check_cache("llama", "chain", "perturbed")),
    (refill_keeps_the_old_length, greedy("chain")),
    (refill_keeps_the_old_seen_tokens, sampled()),
    (eos_inside_the_path_is_overrun, lambda: checks.check_eos_at_every_depth("llama", "chain")),
    (penalty_forgets_the_nodes_ancestors, sampled(Sampling(repetition_penalty=2.5), "right")),
    (noise_is_keyed_by_slot, lambda: checks.check_independence("llava", "chain", PENALISED)),
    (noise_forgets_the_position, sampled()),
    (a_finished_row_is_dropped, greedy()),
    (top_p_keeps_one_token_too_few, sampled()),
    (residual_is_the_targets_own_distribution, rejection_fits("chain")),
    (residual_reuses_the_drafts_noise, rejection_fits("chain")),
    (second_sibling_is_judged_by_the_unreduced_draft, rejection_fits("branching")),
    (stop_string_is_left_in_the_text, lambda: checks.check_stop_strings("llama")),
]


@pytest.mark.slow_cases("noise_is_keyed_by_slot", "refill_keeps", "residual_reuses", "second_sibling")
@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some faults are also found when a model is loaded; here the check must find them.
    monkeypatch.setattr("models.target.prove", lambda *_: None)
    fault(monkeypatch)
    try:
        check()
    except (AssertionError, IndexError):
        return
    pytest.fail(f"the check passes although {fault.__name__.replace('_', ' ')}")


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(FAULTS)), ids=[fault.__name__ for fault, _ in FAULTS])
def test_the_same_check_passes_without_the_fault(place: int) -> None:
    FAULTS[place][1]()
