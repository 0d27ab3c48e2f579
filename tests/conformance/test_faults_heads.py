"""Planted faults of heads: each must make its check fail; most do not change lossless output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import decoding.trees.pool as pool
from decoding import Sampling
from decoding.acceptance import Rejection
from decoding.drafters import EagleDrafter, MedusaDrafter, ParallelEagleDrafter
from decoding.trees import DynamicTree
from models.backends.attention import LayerInputs
from models.heads.eagle3 import Eagle3Network, FirstLayer
from models.heads.medusa import MedusaHeads
from models.loading.vocabulary import SlicedHead
from tests.conformance import checks, heads
from tests.decoding.trees import test_dynamic as trees
from tests.models.heads import test_eagle3, test_peagle

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def prompt_features_are_shifted_by_one(patch: Patch) -> None:
    pairs = EagleDrafter._pairs

    def shifted(self: Any, probe: Any, first: Tensor) -> Any:
        return pairs(self, replace(probe, features=probe.features.roll(-1, 1)), first)

    patch.setattr(EagleDrafter, "_pairs", shifted)


def accepted_features_are_shifted_by_one(patch: Patch) -> None:
    commit = EagleDrafter.commit

    def shifted(self: Any, judgement: Any, verdict: Any) -> None:
        commit(self, replace(judgement, features=judgement.features.roll(1, 2)), verdict)

    patch.setattr(EagleDrafter, "commit", shifted)


def accepted_tokens_keep_the_heads_own_features(patch: Patch) -> None:
    """The tree's positions are committed unchanged, instead of being encoded again with the target's features."""
    commit = EagleDrafter.commit

    def lazy(self: Any, judgement: Any, verdict: Any) -> None:
        own = self._column.gather(1, judgement.tree.origin).clamp_min(0)
        size = judgement.features.shape[3]
        features = self._outputs.gather(2, own[:, None, :, None].expand(-1, 1, -1, size))
        commit(self, replace(judgement, features=features), verdict)

    patch.setattr(EagleDrafter, "commit", lazy)


def levels_feed_on_the_roots_output(patch: Patch) -> None:
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

    def blind(self: Any, probe: Any, first: Tensor) -> Any:
        prefix = replace(probe.prefix, visual=torch.zeros_like(probe.prefix.visual))
        return pairs(self, replace(probe, prefix=prefix), first)

    patch.setattr(EagleDrafter, "_pairs", blind)


def ties_go_to_the_younger_node(patch: Patch) -> None:
    def younger(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        ordered, index = scores.flip(1).sort(dim=1, descending=True, stable=True)
        return ordered[:, :count], scores.shape[1] - 1 - index[:, :count]

    patch.setattr(pool, "best_of", younger)


def origin_names_the_kept_node_instead_of_the_grown(patch: Patch) -> None:
    finish = DynamicTree.finish

    def renumbered(self: Any) -> Any:
        tree = finish(self)
        return replace(tree, origin=torch.arange(tree.num_nodes).expand_as(tree.tokens))

    patch.setattr(DynamicTree, "finish", renumbered)


def deeper_nodes_than_a_row_can_use_are_ranked(patch: Patch) -> None:
    grow = DynamicTree.grow
    patch.setattr(DynamicTree, "grow", lambda self, level: grow(self, replace(level, max_depth=None)))


def medusa_starts_one_head_too_far(patch: Patch) -> None:
    logits = MedusaHeads.logits

    def later(self: Any, head: int, hidden: Tensor) -> Tensor:
        return logits(self, min(head + 1, self.shape.num_heads - 1), hidden)

    draft = MedusaDrafter.draft

    def patched(self: Any, slots: Any, frontier: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(MedusaHeads, "logits", later)
            return draft(self, slots, frontier)

    patch.setattr(MedusaDrafter, "draft", patched)


def medusa_reads_the_roots_state_after_every_step(patch: Patch) -> None:
    commit = MedusaDrafter.commit

    def stale(self: Any, judgement: Any, verdict: Any) -> None:
        commit(self, judgement, replace(verdict, n=torch.ones_like(verdict.n)))

    patch.setattr(MedusaDrafter, "commit", stale)


def picked_drafts_are_judged_as_if_drawn(patch: Patch) -> None:
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


def states_are_fed_back_normalized(patch: Patch) -> None:
    forward = Eagle3Network.forward

    def normed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.last_hidden_state = self.norm(out.last_hidden_state)
        return out

    patch.setattr(Eagle3Network, "forward", normed)


def the_residual_is_normalized(patch: Patch) -> None:
    forward = FirstLayer.forward

    def other(self: Any, pairs: Tensor, **kwargs: Any) -> Tensor:
        self.norm_before_residual = True
        return forward(self, pairs, **kwargs)

    patch.setattr(FirstLayer, "forward", other)


def pairs_of_three_axes_are_counted(patch: Patch) -> None:
    pairs = EagleDrafter._pairs

    def without_axes(self: Any, probe: Any, first: Tensor) -> Any:
        self.network.takes_axes, kept = False, self.network.takes_axes
        made = pairs(self, probe, first)
        self.network.takes_axes = kept
        return made

    patch.setattr(EagleDrafter, "_pairs", without_axes)


def memory_of_eagle3() -> None:
    heads.check_memory("llama", "dynamic", kind="eagle3")


def memory_on_three_axes() -> None:
    heads.check_memory("qwen2_5_vl", "chain", kind="eagle3-axes")


def masks_are_one_position_late(patch: Patch) -> None:
    run = ParallelEagleDrafter._run

    def late(self: Any, slots: Any, tokens: Any, features: Any, depth: Any, sees: Any, offset: int) -> Any:
        is_masks = tokens.shape[1] == len(self._places)
        return run(self, slots, tokens, features, depth + int(is_masks), sees, offset)

    patch.setattr(ParallelEagleDrafter, "_run", late)


def masks_see_later_masks(patch: Patch) -> None:
    start = ParallelEagleDrafter.open

    def opened(self: Any, spec: Any) -> None:
        start(self, spec)
        self._causal = torch.ones_like(self._causal)

    patch.setattr(ParallelEagleDrafter, "open", opened)


def masks_carry_the_roots_output(patch: Patch) -> None:
    draft_all = ParallelEagleDrafter._draft_all

    def wrong(self: Any, slots: Any) -> Any:
        self._features = self._output[slots.index][:1, :, None].expand_as(self._features)
        return draft_all(self, slots)

    patch.setattr(ParallelEagleDrafter, "_draft_all", wrong)


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


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (prompt_features_are_shifted_by_one, memory),
    (accepted_features_are_shifted_by_one, memory),
    (accepted_tokens_keep_the_heads_own_features, memory),
    (image_columns_are_embedded_as_placeholders, memory_with_images),
    (levels_feed_on_the_roots_output, drafts("eagle", "branching")),
    (origin_names_the_kept_node_instead_of_the_grown, lambda: checks_cache()),
    (ties_go_to_the_younger_node, trees.test_of_equal_scores_the_parent_is_kept),
    (
        deeper_nodes_than_a_row_can_use_are_ranked,
        trees.test_a_rows_tree_does_not_depend_on_how_deep_its_neighbours_may_go,
    ),
    (features_come_from_another_layer, memory_of_eagle3),
    (draft_ids_are_taken_for_target_ids, recorded_chain),
    (states_are_fed_back_normalized, recorded_chain),
    (the_residual_is_normalized, recorded_chain),
    (pairs_of_three_axes_are_counted, memory_on_three_axes),
    (masks_are_one_position_late, recorded_levels),
    (masks_see_later_masks, recorded_levels),
    (masks_carry_the_roots_output, recorded_levels),
    (medusa_starts_one_head_too_far, drafts("medusa")),
    (medusa_reads_the_roots_state_after_every_step, drafts("medusa")),
    (picked_drafts_are_judged_as_if_drawn, picked_drafts_fit),
]


def checks_cache() -> None:
    """A model drafter commits the positions of `origin`."""
    with pytest.MonkeyPatch.context() as inner:
        inner.setitem(checks.TREES, "dynamic", lambda: DynamicTree(3, 2, 6))
        checks.check_cache("llama", "dynamic", "perturbed")


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch
) -> None:
    check()
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check()


def test_a_wrong_head_is_invisible_in_the_output_and_visible_in_the_acceptance(monkeypatch: Patch) -> None:
    """Drafts must be compared, because a broken head does not change lossless output."""
    good = heads.check_sampled("eagle", "llama", "dynamic", Sampling())
    prompt_features_are_shifted_by_one(monkeypatch)
    accepted_features_are_shifted_by_one(monkeypatch)
    assert heads.check_sampled("eagle", "llama", "dynamic", Sampling()) < good
