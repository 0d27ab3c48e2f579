"""Tree growth by levels: the drafter returns distributions for the frontier, the policy picks children and the next
frontier. Nodes with non-finite logits get no children.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decoding.contracts import Drafter, Level, StepNoise, TreePolicy
from decoding.noise import Stream
from decoding.sampling import RowSampling, warp
from decoding.tree import DraftTree, Frontier
from models.kv.lanes import SlotBatch


def grow_tree(
    drafter: Drafter,
    policy: TreePolicy,
    slots: SlotBatch,
    root: Tensor,
    num_levels: int,
    rows: RowSampling,
    noise: StepNoise,
    stream: Stream,
    keep_probs: bool,
    max_depth: Tensor | None = None,
) -> DraftTree:
    """Grow one tree per slot under `root` (b,), at most `num_levels` deep.

    `max_depth` (b,) is the deepest useful draft of each row.
    """
    if num_levels == 0:
        return DraftTree.root_only(root)
    frontier: Frontier | None = policy.start(slots, root, num_levels, keep_probs)
    sound: list[Tensor] = []
    while frontier is not None:
        drafted = drafter.draft(slots, frontier)
        logits = warp(drafted, rows, None if rows.seen is None else frontier.path)
        draws = None
        if rows.any_sampled:
            # One draw per depth; shared with the target's choice at this depth under shared noise.
            draws = noise.gumbel(stream)[:, frontier.depth : frontier.depth + 1]
        level = Level(logits, draws, rows, max_depth)
        frontier = policy.grow(level)
        if not policy.checks_numbers:
            sound.append(level.is_sound)
    tree = policy.finish()
    return replace(tree, failed=~torch.cat(sound, dim=1).flatten(1).all(dim=1)) if sound else tree
