"""Hand-made verification blocks: a tree, the target's token after every node, and states with known directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.contracts import EngineSpec, PrefillOutput, StepNoise, VerificationOutput
from decoding.noise import Noise
from decoding.sampling import RowSampling
from decoding.tree import DraftTree
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch

VOCAB_SIZE = 40
EOS = 2
SURE = 20.0
"""The logit of the wanted token where a test cares for nothing else."""


def spec(num_slots: int = 4, hidden_size: int = 4, max_levels: int = 12) -> EngineSpec:
    return EngineSpec(
        num_slots=num_slots,
        max_context_tokens=4096,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        device=torch.device("cpu"),
        eos_ids=frozenset([EOS]),
        special_ids=frozenset([0, 1, EOS, 3]),
        max_frontier_nodes=32,
        max_grown_nodes=32,
        max_levels=max_levels,
    )


def slots(*ids: int) -> SlotBatch:
    return SlotBatch(torch.tensor(ids), ids, (1,) * len(ids))


def tree(
    tokens: Sequence[Sequence[int]], parents: Sequence[int], valid: Sequence[Sequence[bool]] | None = None
) -> DraftTree:
    """One shape for all rows: `tokens` of every row with the root's first, `parents` with −1 for the root."""
    depth = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        depth[node] = depth[parent] + 1
    b = len(tokens)
    values = torch.tensor(tokens)
    above = torch.tensor(parents).expand(b, -1)
    return DraftTree(
        tokens=values,
        parents=above,
        depth=torch.tensor(depth).expand(b, -1),
        valid=torch.ones_like(values, dtype=torch.bool) if valid is None else torch.tensor(valid),
        origin=torch.arange(len(parents)).expand(b, -1),
        num_levels=max(depth),
        max_siblings=max(list(parents).count(parent) for parent in parents),
        is_chain=list(parents) == list(range(-1, len(parents) - 1)),
    )


def chain(*rows: Sequence[int], valid: Sequence[Sequence[bool]] | None = None) -> DraftTree:
    """A chain for each row: its drafts, under a root that is token 39."""
    return tree([[39, *row] for row in rows], list(range(-1, len(rows[0]))), valid)


def wanting(*rows: Sequence[int]) -> Tensor:
    """Logits (b, N, V) of a target that surely takes the given token after each node."""
    return SURE * torch.nn.functional.one_hot(torch.tensor(rows), VOCAB_SIZE).float()


def verification(
    drafts: DraftTree,
    logits: Tensor,
    hidden: Tensor | None = None,
    where: SlotBatch | None = None,
    temperature: float = 0.0,
    keys: Tensor | None = None,
    position: int = 5,
) -> VerificationOutput:
    """Build the input of an acceptance rule; `hidden` (b, N, D) are the target's states at the nodes."""
    b = logits.shape[0]
    keys = torch.stack([torch.arange(b) + 11, torch.arange(b) + 77], dim=1) if keys is None else keys
    rows = RowSampling(
        temperature=torch.full((b,), temperature),
        top_k=torch.zeros(b, dtype=torch.long),
        top_p=torch.ones(b),
        penalty=torch.ones(b),
        seen=None,
        any_sampled=temperature > 0,
        max_top_k=0,
        any_top_p=False,
    )
    states = torch.zeros(*logits.shape[:2], 4) if hidden is None else hidden
    noise = StepNoise(Noise(keys, torch.full((b,), position)), drafts.num_levels + 1, logits.shape[-1])
    processed_logits = logits / temperature if temperature > 0 else logits
    return VerificationOutput(
        where or slots(*range(b)), drafts, logits, processed_logits, states[:, None], states[:, None], noise, rows
    )


def prefill_output(visual: Tensor, num_text: int = 2) -> PrefillOutput:
    """A prefill whose visual columns have the given states (C, D), between text columns with states of ones."""
    text = torch.ones(num_text, visual.shape[-1], dtype=visual.dtype)
    hidden = torch.cat([text, visual, text])
    marks = torch.tensor([False] * num_text + [True] * visual.shape[0] + [False] * num_text)
    length = hidden.shape[0]
    return PrefillOutput(
        Prefix(torch.zeros(length, dtype=torch.long), hidden, torch.arange(length), marks), hidden[None]
    )


def directions(cosines: Sequence[float]) -> Tensor:
    """States (1 + K, 4), the root's first, whose cosine with the first axis is as given; lengths differ."""
    values = torch.tensor([0.0, *cosines])
    states = torch.zeros(len(values), 4)
    states[:, 0], states[:, 1] = values, (1 - values**2).sqrt()
    return states * torch.arange(1, len(values) + 1)[:, None]
