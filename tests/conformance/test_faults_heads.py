"""Planted faults of heads: each must make its check fail; most do not change lossless output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoding import Sampling
from decoding.acceptance import Rejection
from decoding.drafters import EagleDrafter, MedusaDrafter, ParallelEagleDrafter
from decoding.trees import DynamicTree
from models.backends.attention import LayerInputs
from models.heads.eagle3 import Eagle3Network
from models.loading.vocabulary import SlicedHead
from tests.conformance import checks, heads, planted
from tests.conformance.planted import Patch
from tests.models.heads import test_eagle3, test_peagle

pytestmark = pytest.mark.slow


def prompt_features_are_shifted_by_one(patch: Patch) -> None:
    pairs = EagleDrafter._pairs

    def shifted(self: Any, prefill_output: Any, first: Tensor) -> Any:
        return pairs(self, replace(prefill_output, features=prefill_output.features.roll(-1, 1)), first)

    patch.setattr(EagleDrafter, "_pairs", shifted)


def accepted_features_are_shifted_by_one(patch: Patch) -> None:
    commit = EagleDrafter.commit

    def shifted(self: Any, verification: Any, result: Any) -> None:
        commit(self, replace(verification, features=verification.features.roll(1, 2)), result)

    patch.setattr(EagleDrafter, "commit", shifted)


def levels_read_the_output_of_the_root(patch: Patch) -> None:
    extend = EagleDrafter._extend

    def flat(self: Any, slots: Any, frontier: Any) -> Tensor:
        outputs = self._outputs.clone()
        self._outputs[:, :, 1:] = self._outputs[:, :, :1]
        out = extend(self, slots, frontier)
        width = frontier.nodes.shape[1]
        outputs[:, :, self._num_scratch - width + 1 : self._num_scratch + 1] = out
        self._outputs = outputs
        return out

    patch.setattr(EagleDrafter, "_extend", flat)


def image_columns_are_embedded_as_placeholders(patch: Patch) -> None:
    pairs = EagleDrafter._pairs

    def blind(self: Any, prefill_output: Any, first: Tensor) -> Any:
        prefix = replace(prefill_output.prefix, visual=torch.zeros_like(prefill_output.prefix.visual))
        return pairs(self, replace(prefill_output, prefix=prefix), first)

    patch.setattr(EagleDrafter, "_pairs", blind)


def origin_names_the_kept_node_instead_of_the_grown(patch: Patch) -> None:
    finish = DynamicTree.finish

    def renumbered(self: Any) -> Any:
        tree = finish(self)
        return replace(tree, origin=torch.arange(tree.num_nodes).expand_as(tree.tokens))

    patch.setattr(DynamicTree, "finish", renumbered)


def medusa_reads_the_roots_state_after_every_step(patch: Patch) -> None:
    commit = MedusaDrafter.commit

    def stale(self: Any, verification: Any, result: Any) -> None:
        commit(self, verification, replace(result, n=torch.ones_like(result.n)))

    patch.setattr(MedusaDrafter, "commit", stale)


def deterministic_drafts_are_verified_as_sampled_ones(patch: Patch) -> None:
    grow, finish = DynamicTree.grow, DynamicTree.finish
    probs: list[Tensor] = []

    def remember(self: Any, level: Any) -> Any:
        if self._frontier.depth == 0:
            probs[:] = [level.logits.softmax(-1)[:, 0]]
        return grow(self, level)

    def with_probs(self: Any) -> Any:
        tree = finish(self)
        return replace(tree, draft_probs=probs[0][:, None].expand(-1, tree.num_nodes, -1))

    patch.setattr(DynamicTree, "grow", remember)
    patch.setattr(DynamicTree, "finish", with_probs)


def features_come_from_another_layer(patch: Patch) -> None:
    add = LayerInputs.add
    patch.setattr(LayerInputs, "add", lambda self, index, hidden: add(self, 1 - index, hidden))


def draft_ids_are_taken_for_target_ids(patch: Patch) -> None:
    patch.setattr(
        Eagle3Network,
        "output_layer",
        lambda self, size: nn.Sequential(self.norm, SlicedHead(self.lm_head, torch.arange(len(self.token_ids)), size)),
    )


def pairs_of_three_axes_are_counted(patch: Patch) -> None:
    pairs = EagleDrafter._pairs

    def without_axes(self: Any, prefill_output: Any, first: Tensor) -> Any:
        self.network.takes_axes, kept = False, self.network.takes_axes
        made = pairs(self, prefill_output, first)
        self.network.takes_axes = kept
        return made

    patch.setattr(EagleDrafter, "_pairs", without_axes)


def memory_of_eagle3() -> None:
    heads.check_memory("llama", "dynamic", kind="eagle3")


def memory_on_three_axes() -> None:
    heads.check_memory("qwen2_5_vl", "chain", kind="eagle3-axes")


def masks_see_later_masks(patch: Patch) -> None:
    start = ParallelEagleDrafter.open

    def opened(self: Any, spec: Any) -> None:
        start(self, spec)
        self._causal = torch.ones_like(self._causal)

    patch.setattr(ParallelEagleDrafter, "open", opened)


def recorded_levels() -> None:
    test_peagle.test_all_levels_of_one_forward_equal_the_public_code("peagle_speculators", 5)


def recorded_chain() -> None:
    test_eagle3.test_a_drafted_chain_equals_the_public_code("eagle3_speculators")


def memory() -> None:
    heads.check_memory("llama", "dynamic")


def memory_with_images() -> None:
    heads.check_memory("llava", "chain")


def drafts(kind: str, tree: str = "dynamic") -> Callable[[], None]:
    return lambda: heads.check_drafts(kind, "llama", tree)


def picked_drafts_fit() -> None:
    assert checks.joint_of_two_tokens(lambda: DynamicTree(2, 1, 4), Rejection(), 3000, "loose") < 2.1


FAULTS: list[planted.Fault] = [
    (prompt_features_are_shifted_by_one, memory),
    (accepted_features_are_shifted_by_one, memory),
    (image_columns_are_embedded_as_placeholders, memory_with_images),
    (levels_read_the_output_of_the_root, drafts("eagle", "branching")),
    (origin_names_the_kept_node_instead_of_the_grown, lambda: checks_cache()),
    (features_come_from_another_layer, memory_of_eagle3),
    (draft_ids_are_taken_for_target_ids, recorded_chain),
    (pairs_of_three_axes_are_counted, memory_on_three_axes),
    (masks_see_later_masks, recorded_levels),
    (medusa_reads_the_roots_state_after_every_step, drafts("medusa")),
    (deterministic_drafts_are_verified_as_sampled_ones, picked_drafts_fit),
]


def checks_cache() -> None:
    """A model drafter commits the positions of `origin`."""
    with pytest.MonkeyPatch.context() as inner:
        inner.setitem(checks.TREES, "dynamic", lambda: DynamicTree(3, 2, 6))
        checks.check_cache("llama", "dynamic", "perturbed")


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)


def test_a_wrong_head_is_invisible_in_the_output_and_visible_in_the_acceptance(monkeypatch: Patch) -> None:
    """Drafts must be compared, because a broken head does not change lossless output."""
    good = heads.check_sampled("eagle", "llama", "dynamic", Sampling())
    prompt_features_are_shifted_by_one(monkeypatch)
    accepted_features_are_shifted_by_one(monkeypatch)
    assert heads.check_sampled("eagle", "llama", "dynamic", Sampling()) < good
