"""Checks of drafts with MTP layers. Tests run them, and planted faults must make them fail.

The oracle of outputs is the target alone. The oracle of drafts is the `MtpLayer` of transformers over prompt, text and
drafts, without batch, KV cache or tree, at positions computed from the prompt by transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.contracts import Acceptance, TreePolicy, VerificationOutput
from decoding.drafters import MtpDrafter
from decoding.trees import Chain
from models.heads.mtp import MtpNetwork
from models.heads.training.mtp_loss import fresh_mtp
from models.heads.training.teacher import make_training_sample
from models.heads.training.trainer import Pace, Trainer
from models.inputs.prefix import Prefix
from models.target import Target
from tests import toys
from tests.conformance import checks, heads
from tests.conformance.erratic import unsettled
from tests.toys.mixtures import deepseek_v3, glm4_moe

MIXTURES = {
    "deepseek_v3": toys.Family(deepseek_v3, toys.make_tokenizer),
    "glm4_moe": toys.Family(glm4_moe, toys.make_tokenizer),
}
FAMILIES = ("deepseek_v3", "glm4_moe", "qwen2_5_vl", "qwen3_vl", "llama")
NUM_STEPS = 100
MIN_MARGIN = 1e-3
"""Tokens whose logits are closer than this may differ by rounding."""


@contextmanager
def mixtures() -> Iterator[None]:
    """Make the mixtures of experts available as families of toys."""
    with pytest.MonkeyPatch.context() as patch:
        for name, family in MIXTURES.items():
            patch.setitem(toys.FAMILIES, name, family)
        yield


@cache
def network(family: str) -> MtpNetwork:
    """An MTP layer that is trained on most of the checked texts, so that it is often right and often wrong."""
    target = toys.target(family)
    task = fresh_mtp(target, 0)
    samples = []
    for request in checks.requests(family, 9, longest=26)[:6]:
        prompt = target.encode(request.prompt, request.images, request.videos)
        answer = checks.generated(family, request, target.eos_ids)
        samples.append(make_training_sample(target, prompt, answer))
    options: dict[str, Any] = {"schedule": "cosine", "clip": "norm", "clip_limit": 1.0, "noise_tokens": None}
    trainer = Trainer(target, task, Pace(NUM_STEPS, 1e-2, warmup_steps=10, **options))
    for _ in range(NUM_STEPS):
        trainer.learn(list(enumerate(samples)))
    return task.network.requires_grad_(False)


def make_drafter(target: Target) -> MtpDrafter:
    return MtpDrafter(copy.deepcopy(network(target.name)), target.head)


def make_engine(
    family: str, tree: TreePolicy, slots: int, rule: Acceptance | None = None, pattern: Sequence[int] = ()
) -> Engine:
    """An engine that drafts with an MTP layer; with a `pattern`, step i has trees of at most `pattern[i]` levels."""
    target = toys.target(family)
    method = Method(make_drafter(target), tree, rule or Exact())
    return Engine(target, unsettled(method, pattern=list(pattern)) if pattern else method, slots, 128)


def check_greedy(family: str, tree: TreePolicy, slots: int, pattern: Sequence[int] = ()) -> float:
    """Greedy output equals transformers' `generate`, token for token; returns the share of accepted drafts."""
    engine, wanted = make_engine(family, tree, slots, pattern=pattern), checks.requests(family, 9)
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.generated(family, request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id
        checks.check_telemetry(done[request.sample_id])
    return accepted_share(done.values())


def check_sampled(family: str, tree: TreePolicy, slots: int, sampling: Sampling, pattern: Sequence[int] = ()) -> float:
    """Sampled output equals the slow reference under shared noise; returns the share of accepted drafts."""
    engine, wanted = make_engine(family, tree, slots, pattern=pattern), checks.requests(family, 9, sampling)
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.referenced(family, request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id
        checks.check_telemetry(done[request.sample_id])
    return accepted_share(done.values())


def accepted_share(done: Any) -> float:
    telemetry = [completion.telemetry for completion in done]
    return sum(t.num_accepted_draft_tokens for t in telemetry) / sum(t.num_draft_tokens for t in telemetry)


def slow_layer(family: str) -> MtpLayer:
    """The layer by transformers' own code, with the weights of `network`."""
    model: Any = toys.oracle(family)
    decoder = model.get_decoder()
    config = copy.deepcopy(decoder.config)
    if family in MIXTURES:
        config = model.config.get_mtp_config()
    elif getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    config._attn_implementation = "eager"
    layer = MtpLayer(config, type(decoder.layers[-1]), type(decoder.norm), 0)
    layer.load_state_dict(network(family).state_dict())
    return layer.eval()


@torch.no_grad()
def slow_logits(
    layer: MtpLayer, family: str, prompt: Prefix, states: Tensor, tokens: list[int], path: list[int]
) -> Tensor:
    """Logits after prompt, `tokens` and the drafted `path`: the layer runs over all pairs for each draft.

    `states` (L, D) are the target's over prompt and all `tokens` but the last.
    """
    model: Any = toys.oracle(family)
    decoder, embed = model.get_decoder(), model.get_input_embeddings()
    made = torch.tensor([*tokens, *path])
    first, axes = prompt.positions.max() + 1, prompt.positions.dim() == 2
    later = first + torch.arange(len(made))
    positions = torch.cat([prompt.positions, later.expand(3, -1) if axes else later], dim=-1)[..., 1:]
    embeds = torch.cat([prompt.embeds[1:], embed(made)])
    for count in range(len(path) + 1):
        length = len(states)
        at = positions[..., :length]
        rotated = at[:, None] if axes else at[None]
        if not axes and "mrope_section" in (decoder.config.rope_parameters or {}):
            rotated = rotated.expand(3, 1, -1)
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        outputs = run_layer(layer, embeds[None, :length], states[None], decoder.rotary_emb(embeds[None], rotated), mask)
        if count == len(path):
            logits: Tensor = model.get_output_embeddings()(outputs[0, -1])
            return logits
        states = torch.cat([states, outputs[0, -1:]])
    raise AssertionError("unreachable")


def run_layer(layer: MtpLayer, embeds: Tensor, states: Tensor, rotary: Any, mask: Tensor) -> Tensor:
    """Run transformers' layer without a KV cache; the keyword of the cache was renamed in 5.24."""
    keywords = {"position_embeddings": rotary, "attention_mask": mask, "position_ids": None}
    try:
        out: Any = layer(embeds, states, **keywords, cache=None)
    except TypeError:
        out = layer(embeds, states, **keywords, past_key_values=None)
    return out[0] if isinstance(out, tuple) else out


def check_drafts(family: str, tree: TreePolicy, pattern: Sequence[int] = (), count: int = 6) -> int:
    """Every draft is among the best of the slow layer after prompt, text and the drafts above it; returns how many
    were compared."""
    engine, layer = make_engine(family, tree, 3, pattern=pattern), slow_layer(family)
    compared = [0]

    @torch.no_grad()
    def look(verification: VerificationOutput) -> None:
        made = verification.tree
        for row, slot in enumerate(verification.slots.ids):
            progress = engine._slots.progress[slot]
            assert progress is not None
            request, tokens = progress.request, list(progress.token_ids)
            states = heads.true_states(family, request, tokens[:-1])
            prompt = engine.target.encode(request.prompt, request.images, request.videos)
            for node in range(made.num_nodes):
                below = heads.children(made, row, node)
                if not below or not made.valid[row, node]:
                    continue
                path = heads.line(made, row, node)
                best = slow_logits(layer, family, prompt, states, tokens, path).topk(len(below) + 1)
                if float((best.values[:-1] - best.values[1:]).min()) < MIN_MARGIN:
                    continue
                assert below == best.indices[:-1].tolist(), (request.sample_id, len(tokens), path)
                compared[0] += 1

    engine.method = replace(engine.method, acceptance=heads.Watcher(look))
    checks.run(engine, checks.requests(family, count))
    assert compared[0] > (10 if pattern else 20), compared
    return compared[0]


def chain(length: int) -> TreePolicy:
    return Chain(length)
