"""Checks of drafters that run some of the target's layers. Tests run them, and planted faults must make them fail."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contracts import TreePolicy, VerificationOutput
from decoding.drafters import LayerSkipDrafter
from decoding.reference import cache_of
from decoding.trees import DynamicTree
from models.backends.attention import AttentionStep, DecoderRunner
from models.target import Target
from tests import toys
from tests.conformance import checks, heads
from tests.llamagen_reference import LlamaGenReference
from tests.toys import images

TREES: dict[str, Callable[[], TreePolicy]] = checks.TREES | {
    "pruned": lambda: DynamicTree(4, 3, 5),
    "wide": lambda: DynamicTree(8, 3, 5),
}
"""Trees by name; of `pruned` and `wide`, the drafter runs up to 13 and 25 nodes, and the target 5."""


@cache
def deep_oracle() -> nn.Module:
    """A toy of four layers, so that layers in the middle can be skipped."""
    config = copy.deepcopy(toys.text_config())
    config.num_hidden_layers = 4
    model = type(toys.llama())(config).eval()
    toys.randomise(model, 5)
    return model


def oracle(family: str) -> Any:
    return deep_oracle() if family == "deep" else toys.oracle(family)


def target(family: str) -> Target:
    if family == "deep":
        return Target(copy.deepcopy(deep_oracle()), toys.front_end("llama"), "llama")
    return toys.target(family)


@contextlib.contextmanager
def only(model: Any, layers: Sequence[int]) -> Iterator[None]:
    """Let transformers' model run only some of its layers, each over its own part of the KV cache."""
    decoder = model.get_decoder()
    whole, decoder.layers = decoder.layers, nn.ModuleList(decoder.layers[index] for index in layers)
    try:
        yield
    finally:
        decoder.layers = whole


@torch.no_grad()
def slow_logits(family: str, layers: Sequence[int], request: Request, tokens: list[int], path: list[int]) -> Tensor:
    """Logits (V,) after the output `tokens` and a drafted path: the target's forward over prompt and tokens, the last
    one excluded, and one of some layers over the last one and the path."""
    model = oracle(family)
    name = "llama" if family == "deep" else family
    inputs = toys.front_end(name).encode(request.prompt, request.images, request.videos)
    positions = model._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))
    later = positions[..., -1:] + torch.arange(1, len(tokens) + len(path) + 1)
    out = model(**inputs, use_cache=True)
    held = len(tokens) - 1
    if held:
        ids = torch.tensor([tokens[:-1]])
        out = model(input_ids=ids, position_ids=later[..., :held], **cache_of(model, out), use_cache=True)
    with only(model, layers):
        ids = torch.tensor([[tokens[-1], *path]])
        out = model(input_ids=ids, position_ids=later[..., held:], **cache_of(model, out), use_cache=True)
    if hasattr(getattr(model, "model", None), "rope_deltas"):
        model.model.rope_deltas = None
    logits: Tensor = out.logits[0, -1]
    return logits


def make_engine(family: str, layers: Sequence[int], tree: str, slots: int) -> Engine:
    return Engine(target(family), Method(LayerSkipDrafter(layers), TREES[tree](), Exact()), slots, 128)


def check_drafts(family: str, layers: Sequence[int], tree: str) -> None:
    """Every node's children equal those of transformers' layers, node by node, without batch or tree."""
    engine = make_engine(family, layers, tree, 3)
    num_compared = 0

    def look(verification: VerificationOutput) -> None:
        nonlocal num_compared
        made = verification.tree
        for row, slot in enumerate(verification.slots.ids):
            progress = engine._slots.at(slot)
            for node in range(made.num_nodes):
                below = heads.children(made, row, node)
                if not below or not made.valid[row, node]:
                    continue
                path = heads.line(made, row, node)
                logits = slow_logits(family, layers, progress.request, progress.token_ids, path)
                best = logits.topk(len(below) + 1)
                if float((best.values[:-1] - best.values[1:]).min()) < 1e-3:
                    continue  # closer than rounding
                assert below == best.indices[:-1].tolist(), (progress.request.sample_id, path)
                num_compared += 1

    engine.method = replace(engine.method, acceptance=heads.Watcher(look))
    checks.run(engine, checks.requests("llama" if family == "deep" else family, 5, longest=14))
    assert num_compared > 15, num_compared


def check_image_drafts(kind: str, tree: str) -> None:
    """Every node's children equal those of the slow image reference with the first layer only, guidance included."""
    of = images.target(kind)
    method = Method(LayerSkipDrafter([0], merge=images.merge_of(of)), TREES[tree](), Exact())
    engine = Engine(of, method, 3, 64)
    weights = {name: value for name, value in images.weights(kind).items() if not name.startswith("layers.1.")}
    slow = LlamaGenReference(weights, images.SHAPES[kind].num_heads, images.SHAPES[kind].grid)
    num_compared = 0

    def look(verification: VerificationOutput) -> None:
        nonlocal num_compared
        made = verification.tree
        for row, slot in enumerate(verification.slots.ids):
            progress = engine._slots.at(slot)
            request = progress.request
            condition = request.condition if kind == "class" else torch.from_numpy(request.condition)
            for node in range(made.num_nodes):
                below = heads.children(made, row, node)
                if not below or not made.valid[row, node]:
                    continue
                codes = [*progress.token_ids, *heads.line(made, row, node)]
                asked: list[Tensor] = []

                def replay(position: int, logits: Tensor, codes: list[int] = codes, out: Any = asked) -> int:
                    out.append(logits)
                    return codes[position] if position < len(codes) else 0

                slow.generate(condition, images.reference_sampling(request.sampling), replay, len(codes) + 1)
                best = asked[-1].topk(len(below) + 1)
                if float((best.values[:-1] - best.values[1:]).min()) < 1e-3:
                    continue  # closer than rounding
                assert below == best.indices[:-1].tolist(), (request.sample_id, codes)
                num_compared += 1

    engine.method = replace(engine.method, acceptance=heads.Watcher(look))
    checks.run(engine, images.requests(kind, 5, Sampling(guidance_scale=4.0)))
    assert num_compared > 15, num_compared


def check_cache(family: str, layers: Sequence[int], tree: str) -> None:
    """After every commit, the target's KV cache equals a fresh prefill of each row's tokens."""
    engine = make_engine(family, layers, tree, 3)
    for request in checks.requests("llama" if family == "deep" else family, 12):
        engine.submit(request)
    num_compared = 0
    while engine.has_work:
        engine.step()
        for slot, progress in enumerate(engine._slots.progress):
            if progress is None:
                continue
            running = progress.request
            prefix = engine.target.encode(running.prompt, running.images, running.videos)  # type: ignore[attr-defined]
            row = engine._lanes.rows.first_of(slot)
            checks.compare_row(engine._lanes, row, prefix, progress.token_ids[:-1])
            num_compared += 1
    assert num_compared > 10


class Poisoner(DecoderRunner):
    """Runs some layers, and then leaves NaN in all layers of the KV cache where `some` has written."""

    def __init__(self, some: DecoderRunner) -> None:
        self.some = some
        self.num_poisoned = 0

    def __call__(
        self, embeds: Tensor, positions: Tensor, step: AttentionStep, extra: dict[str, Any], *rest: Any
    ) -> Any:
        hidden = self.some(embeds, positions, step, extra, *rest)
        for memory in (*step.cache.keys, *step.cache.values):
            assert memory is not None
            memory[step.rows[:, None], :, step.columns] = torch.nan
        self.num_poisoned += step.columns.numel()
        return hidden


def check_poisoned(family: str, tree: str, slots: int = 3) -> None:
    """NaN that a drafter leaves at its positions changes no output, in its own and in later steps."""
    engine = make_engine(family, [0], tree, slots)
    drafter: Any = engine.method.drafter
    drafter._runner = poisoner = Poisoner(drafter._runner)
    wanted = checks.requests(family, 9)
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.generated(family, request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id
    assert poisoner.num_poisoned > 100


def check_full_context(tree: str) -> None:
    """A prompt and its output may fill the context; the positions of drafts come on top."""
    request = Request("full", toys.prompt("llama", 4)[0], (), Sampling(max_new_tokens=20, ignore_eos=True))
    length = len(toys.front_end("llama").encode(request.prompt, ())["input_ids"][0])
    method = Method(LayerSkipDrafter([0]), TREES[tree](), Exact())
    engine = Engine(toys.target("llama"), method, 1, length + 20)
    done = checks.run(engine, [request])["full"]
    assert done.token_ids == checks.generated("llama", request, frozenset())
