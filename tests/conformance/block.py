"""Checks of block drafters. Tests run them, and planted faults must make them fail.

The networks are trained briefly on texts of the toy targets, so that they are often right and often wrong. The slow
network here shares no attention, mask or KV cache with the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from decoding import Engine, Method, Request
from decoding.acceptance import Exact
from decoding.contracts import TreePolicy, VerificationOutput
from decoding.drafters import BlockDrafter
from decoding.trees import DynamicTree
from models.heads.block import BlockNetwork, BlockShape, View
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch
from models.target import Target
from tests import toys
from tests.conformance import checks, heads

BLOCK_SIZE, MASK = 5, toys.VOCAB_SIZE - 1
LAYERS = (1, 2)
"""The output of the first layer, and the last state after the final norm."""
TREES: dict[str, Callable[[], TreePolicy]] = checks.TREES | {"dynamic": lambda: DynamicTree(3, 2, 12)}


def shape() -> BlockShape:
    layers = Qwen3Config(
        vocab_size=toys.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )
    return BlockShape(layers, LAYERS, BLOCK_SIZE, MASK, toys.VOCAB_SIZE)


def reads(view: View, length: int, own: int, index: int) -> bool:
    """Whether the position `own` of a block behind `length` positions reads the position `place`."""
    if view.is_causal and index > own:
        return False
    if view.window is None:
        return True
    return index >= length - view.window if view.from_anchor else abs(index - own) < view.window


def slow_block(network: BlockNetwork, features: Tensor, embeds: Tensor) -> Tensor:
    """Outputs (n, B, D) of a block with inputs `embeds` (n, B, D) behind the `features` (n, L, F) of earlier tokens."""
    context, hidden = network.project(features), embeds
    length, size = features.shape[1], embeds.shape[1]
    cos, sin = network.rotary(embeds, torch.arange(length + size)[None])
    views = network.shape.views or (View(),) * len(network.layers)
    for layer, view in zip(network.layers, views, strict=True):
        attention: Any = layer.self_attn
        normed = layer.input_layernorm(hidden)  # type: ignore[operator]
        both = torch.cat([context, normed], dim=1)
        query, key, value = (
            project(inputs).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project, inputs in (
                (attention.q_proj, normed), (attention.k_proj, both), (attention.v_proj, both)
            )
        )  # fmt: skip
        query, key = attention.q_norm(query), attention.k_norm(key)
        query = query * cos[:, None, length:] + rotate_half(query) * sin[:, None, length:]
        key = key * cos[:, None] + rotate_half(key) * sin[:, None]
        seen = torch.tensor([
            [reads(view, length, length + node, index) for index in range(length + size)] for node in range(size)
        ])  # fmt: skip
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[operator]
    out: Tensor = network.norm(hidden)
    return out


@cache
def network(family: str) -> BlockNetwork:
    """A network trained on texts of the target."""
    target = toys.target(family)
    torch.manual_seed(2)
    made = BlockNetwork(shape())
    ids = heads.texts(family)
    # transformers leaves hooks on a model with this option, which a compiler cannot trace.
    model: Any = copy.deepcopy(toys.oracle(family))
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[layer] for layer in LAYERS], dim=-1)
    embed: Any = target.decoder.get_input_embeddings()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(made.parameters(), lr=8e-3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(120):
        rows = torch.randint(0, len(ids), (32,), generator=generator)
        anchor = int(torch.randint(heads.PROMPT_TOKENS - 1, ids.shape[1] - BLOCK_SIZE, (1,), generator=generator))
        block = ids[rows, anchor : anchor + BLOCK_SIZE].clone()
        wanted = block[:, 1:].clone()
        block[:, 1:] = MASK
        outputs = slow_block(made, features[rows, :anchor], embed(block).detach())[:, 1:]
        loss = F.cross_entropy(target.head(outputs).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.requires_grad_(False).eval()


VIEWS = {"windows from the anchor": (View(3, True, True), View()), "windows": (View(4, True), View(3))}


def make_drafter(family: str, target: Target, views: tuple[View, ...] = ()) -> BlockDrafter:
    with toys.on("cpu"):
        trained = network(family)
    made = copy.deepcopy(trained).to(target.device)
    made.shape = replace(made.shape, views=views)
    embed = made.embedding(target.decoder.get_input_embeddings())  # type: ignore[operator]
    return BlockDrafter(made, embed, made.output_layer(target.head, target.vocab_size))


def make_engine(family: str, tree: str, slots: int, views: tuple[View, ...] = ()) -> Engine:
    target = toys.target(family)
    return Engine(target, Method(make_drafter(family, target, views), TREES[tree](), Exact()), slots, 128)


def watch_drafts(engine: Engine, family: str) -> list[int]:
    """Compare every node's children with the slow network; returns a list with the number of compared nodes."""
    drafter: Any = engine.method.drafter
    counted = [0]

    def look(verification: VerificationOutput) -> None:
        made = verification.tree
        for row, slot in enumerate(verification.slots.ids):
            progress = engine._slots.at(slot)
            tokens = progress.token_ids
            features = heads.true_features(LAYERS, family, progress.request, tokens[:-1])
            ids = torch.tensor([[tokens[-1], *[MASK] * (BLOCK_SIZE - 1)]])
            with torch.no_grad():
                outputs = slow_block(drafter.network, features[None], drafter.embed(ids))[0]
                logits = drafter.head(outputs)
            for node in range(made.num_nodes):
                below = heads.children(made, row, node)
                if not below or not made.valid[row, node]:
                    continue
                best = logits[1 + int(made.depth[row, node])].topk(len(below) + 1)
                if float((best.values[:-1] - best.values[1:]).min()) < 1e-3:
                    continue  # closer than rounding
                assert below == best.indices[:-1].tolist(), (progress.request.sample_id, node)
                counted[0] += 1

    engine.method = replace(engine.method, acceptance=heads.Watcher(look))
    return counted


def check_drafts(family: str, tree: str, views: tuple[View, ...] = ()) -> None:
    """Every node's children equal those of the slow network over transformers' states, without batch or KV cache."""
    engine = make_engine(family, tree, 3, views)
    counted = watch_drafts(engine, family)
    wanted = checks.requests(family, 6)
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.generated(family, request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id
    assert counted[0] > 25, counted
    assert any(c.telemetry.num_accepted_draft_tokens for c in done.values()), "nothing was ever accepted"


@torch.no_grad()
def check_memory(engine: Engine, family: str, wanted: Sequence[Request], until_drafted: bool = False) -> None:
    """After every commit, the drafter's KV cache equals a fresh encoding of the target's features.

    With `until_drafted`, only rows without buffered features are compared.
    """
    drafter: Any = engine.method.drafter
    for request in wanted:
        engine.submit(request)
    num_compared = 0
    while engine.has_work:
        engine.step()
        for slot, progress in enumerate(engine._slots.progress):
            if progress is None or slot in drafter._prompts:
                continue
            num_missed = int(drafter._missed.count[slot])
            assert num_missed <= drafter._missed.most[slot]
            features = heads.true_features(LAYERS, family, progress.request, progress.token_ids[:-1])
            length = features.shape[0] - num_missed
            row = drafter.lanes.rows.first_of(slot)
            assert int(drafter.lanes.cache.lens[row]) == length, (int(drafter.lanes.cache.lens[row]), length)
            fresh = LaneModel(drafter.network.context, drafter.head, 1, 1, length)
            marks = torch.zeros(length, dtype=torch.long)
            whole = Prefix(marks, drafter.network.project(features[:length]), torch.arange(length), marks > 0)
            fresh.admit(SlotBatch(torch.zeros(1, dtype=torch.long), (0,), (0,)), [[whole]])
            for mine, theirs in zip(
                (*drafter.lanes.cache.keys, *drafter.lanes.cache.values),
                (*fresh.cache.keys, *fresh.cache.values),
                strict=True,
            ):
                torch.testing.assert_close(mine[row, :, :length], theirs[0, :, :length], atol=3e-4, rtol=1e-3)
            num_compared += 1
    assert num_compared > 10
