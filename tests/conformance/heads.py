"""Checks of drafters that are heads on the target. Tests run them, and planted faults must make them fail.

The heads are trained briefly on texts of the toy targets, so that they are often right and often wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contracts import Acceptance, Drafter, TreePolicy, VerificationOutput
from decoding.drafters import EagleDrafter, MedusaDrafter, ParallelEagleDrafter
from decoding.reference import cache_of
from decoding.tree import AcceptanceResult, DraftTree
from decoding.trees import DynamicTree
from models.heads.eagle import EagleNetwork, FeatureStack
from models.heads.eagle3 import Eagle3Network
from models.heads.medusa import MedusaHeads
from models.heads.training.eagle3_loss import Eagle3Task, fresh_eagle3
from models.heads.training.losses import HeadTask, fresh_eagle, fresh_medusa
from models.heads.training.teacher import TrainingSample
from models.heads.training.trainer import Pace, Trainer
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch
from models.target import Target
from tests import toys
from tests.conformance import checks, vision_heads
from tests.conformance.vision_heads import Inputs

NUM_HEADS = 4
PROMPT_TOKENS, TEXT_TOKENS = 6, 24
TREES: dict[str, Callable[[], TreePolicy]] = checks.TREES | {"dynamic": lambda: DynamicTree(4, 3, 16)}


@cache
def texts(family: str) -> Tensor:
    """Random prompts with the target's own greedy continuations, (texts, tokens)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, toys.VOCAB_SIZE, (192, PROMPT_TOKENS), generator=generator)
    ids[:, 0] = 1
    model: Any = toys.oracle(family)
    out: Tensor = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TEXT_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out


def teach(target: Target, task: HeadTask, num_steps: int, lr: float) -> None:
    """Train a head on these texts, sixteen at a time, with loss on the target's tokens."""
    wanted = torch.arange(PROMPT_TOKENS + TEXT_TOKENS) >= PROMPT_TOKENS
    ids = texts(target.name)
    mask = torch.ones_like(ids[:1])
    training_samples = [
        TrainingSample(target.prefix({"input_ids": row[None], "attention_mask": mask}), wanted) for row in ids
    ]
    pace = Pace(num_steps, lr, warmup_steps=num_steps // 10, schedule="cosine", clip="norm", clip_limit=1.0)
    trainer = Trainer(target, task, replace(pace, noise_tokens=None))
    generator = torch.Generator().manual_seed(5)
    for step in range(num_steps):
        chosen = torch.randint(0, len(training_samples), (16,), generator=generator).tolist()
        trainer.learn([(16 * step + index, training_samples[number]) for index, number in enumerate(chosen)])


@cache
def eagle(family: str) -> EagleNetwork:
    target = toys.target(family)
    task = fresh_eagle(target, 0)
    teach(target, task, 150, 5e-3)
    return task.network


@cache
def eagle3(family: str, has_axes: bool = False) -> Eagle3Network:
    """An EAGLE-3 head that drafts four fifths of the tokens; with `has_axes`, at the target's rotary positions."""
    target = toys.target(family)
    ids = [token for token in range(target.vocab_size) if token % 5]
    task = fresh_eagle3(target, 0, 3, ids, (0, 1))
    if has_axes:
        half: int = task.network.config.head_dim // 2
        sections = (half - 2 * (half // 3), half // 3, half // 3)
        shape = replace(task.network.shape, mrope_sections=sections)
        weights, network = task.network.state_dict(), Eagle3Network(shape)
        network.load_state_dict(weights)
        network.embed_tokens.weight.requires_grad_(False)
        network.token_ids = task.network.token_ids
        task = Eagle3Task(network, target.head, target.vocab_size, 3)
    teach(target, task, 150, 5e-3)
    return task.network


@cache
def peagle(family: str) -> Eagle3Network:
    """A P-EAGLE head whose masks are random: its first level is that of a trained EAGLE-3 head."""
    taught = eagle3(family)
    network = Eagle3Network(replace(taught.shape, mask_token_id=6))
    network.load_state_dict(taught.state_dict(), strict=False)
    torch.nn.init.normal_(network.mask_hidden, generator=torch.Generator().manual_seed(0))
    network.token_ids = taught.token_ids
    return network.requires_grad_(False)


NETWORKS: dict[str, Callable[[str], FeatureStack]] = {
    "eagle": eagle,
    "vispec": cache(lambda family: vision_heads.vispec(eagle(family))),
    "msd": cache(lambda family: vision_heads.msd(eagle(family))),
    "eagle3": eagle3,
    "eagle3-axes": lambda family: eagle3(family, has_axes=True),
    "peagle": peagle,
}


@cache
def medusa(family: str) -> MedusaHeads:
    target = toys.target(family)
    task = fresh_medusa(target, 0, NUM_HEADS)
    teach(target, task, 100, 4e-3)
    return task.heads


def make_drafter(kind: str, target: Target) -> Drafter:
    with toys.on("cpu"):
        made = NETWORKS.get(kind, medusa)(target.name)
    network: Any = copy.deepcopy(made).to(target.device)
    if kind in NETWORKS:
        head = network.output_layer(target.vocab_size) if isinstance(network, Eagle3Network) else target.head
        return ParallelEagleDrafter(network, head) if kind == "peagle" else EagleDrafter(network, head)
    return MedusaDrafter(network)


def make_engine(kind: str, family: str, tree: str, slots: int, rule: Acceptance | None = None) -> Engine:
    target = toys.target(family)
    return Engine(target, Method(make_drafter(kind, target), TREES[tree](), rule or Exact()), slots, 128)


def check_greedy(kind: str, family: str, tree: str, slots: int, rule: Acceptance | None = None) -> checks.Recorder:
    """Greedy output equals transformers' `generate` of the target alone, token for token."""
    recorder = checks.Recorder(rule or Exact())
    engine = make_engine(kind, family, tree, slots, recorder)
    wanted = checks.requests(family, 9)
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.generated(family, request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id
        checks.check_telemetry(done[request.sample_id])
    assert any(c.telemetry.num_accepted_draft_tokens for c in done.values()), "nothing was ever accepted"
    return recorder


def check_sampled(kind: str, family: str, tree: str, sampling: Sampling) -> float:
    """Shared-noise sampling equals the slow reference token for token; returns the mean acceptance length."""
    engine = make_engine(kind, family, tree, 4)
    wanted = checks.requests(family, 9, sampling)
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.referenced(family, request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id
        checks.check_telemetry(done[request.sample_id])
    return sum(c.telemetry.mean_acceptance_length for c in done.values()) / len(done)


def check_independence(kind: str, family: str, tree: str, sampling: Sampling) -> None:
    """Output and acceptance of a sample do not depend on batch, order or slot."""
    wanted = checks.requests(family, 8, sampling)
    outputs = []
    for slots, order in ((1, wanted), (3, wanted[::-1]), (8, wanted[4:] + wanted[:4])):
        done = checks.run(make_engine(kind, family, tree, slots), order)
        outputs.append(
            {
                key: (c.token_ids, c.telemetry.acceptance_histogram, c.telemetry.num_draft_tokens)
                for key, c in done.items()
            }
        )
    assert outputs[0] == outputs[1] == outputs[2]


def check_eos(kind: str, family: str, tree: str) -> None:
    """A text ends at its EOS at every place of a tree."""
    inside = 0
    for sample in range(3):
        base = Request("eos", *toys.prompt(family, sample), Sampling(max_new_tokens=16))
        full = checks.generated(family, base, frozenset())
        for token in sorted(set(full)):
            engine = make_engine(kind, family, tree, 2)
            engine.target.eos_ids = frozenset([token])
            others = [
                replace(base, sample_id=f"other-{i}", prompt=toys.prompt(family, i)[0], images=()) for i in (4, 5)
            ]
            others = [request for request in others if "<image>" not in request.prompt]
            done = checks.run(engine, [base, *others])
            assert done["eos"].token_ids == full[: full.index(token) + 1]
            assert done["eos"].finish_reason == "stop"
            checks.check_telemetry(done["eos"])
            inside += done["eos"].telemetry.ended_inside_path
    assert inside, "no text ended inside a path"


class Watcher(checks.Recorder):
    """An acceptance rule that calls `look` before every decision."""

    def __init__(self, look: Callable[[VerificationOutput], None]) -> None:
        super().__init__(Exact())
        self.look = look

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        self.look(verification)
        return self.rule.accept(verification)


@torch.no_grad()
def true_states(family: str, request: Request, tokens: list[int]) -> Tensor:
    """The target's own last states over prompt and `tokens`, by transformers' forward; (L, D)."""
    model: Any = toys.oracle(family)
    seen: list[Tensor] = []
    handle = model.get_decoder().register_forward_hook(lambda _m, _i, out: seen.append(out.last_hidden_state[0]))
    inputs = toys.front_end(family).encode(request.prompt, request.images, request.videos)
    positions = model._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))
    out = model(**inputs, use_cache=True)
    if tokens:
        later = positions[..., -1:] + torch.arange(1, len(tokens) + 1)
        ids = torch.tensor([tokens])
        model(input_ids=ids, position_ids=later, **cache_of(model, out), use_cache=True)
    handle.remove()
    return torch.cat(seen)


def true_features(layers: Sequence[int], family: str, request: Request, tokens: list[int]) -> Tensor:
    """The target's own features over prompt and `tokens`, by transformers' forward; (L, F).

    Hooks are removed again: a compiler cannot trace those that `output_hidden_states` leaves on the shared oracle.
    """
    model: Any = toys.oracle(family)
    inner = model.get_decoder().layers
    inputs_of_layer: dict[int, list[Tensor]] = {layer: [] for layer in layers if 0 <= layer < len(inner)}
    handles = []
    for layer, states in inputs_of_layer.items():
        record = lambda _m, args, kwargs, states=states: states.append((args or [kwargs["hidden_states"]])[0][0])  # noqa: E731
        handles.append(inner[layer].register_forward_pre_hook(record, with_kwargs=True))
    last = true_states(family, request, tokens)
    for handle in handles:
        handle.remove()
    return torch.cat(
        [torch.cat(inputs_of_layer[layer]) if layer in inputs_of_layer else last for layer in layers], dim=-1
    )


def pair_positions(network: FeatureStack, prefix: Prefix, length: int) -> Tensor:
    """The rotary positions of the head's pairs, (L,) or (3, L)."""
    if not network.takes_axes:
        return torch.arange(length)
    first = prefix.next_position
    later = torch.arange(length - prefix.length) + first
    if prefix.axis_offsets is None:
        return torch.cat([prefix.positions, later])
    return torch.cat([prefix.positions, later + prefix.axis_offsets[:, None]], dim=-1)


def true_pairs(network: FeatureStack, family: str, request: Request, prefix: Prefix, tokens: list[int]) -> Inputs:
    """The expected inputs of the head: pair t is feature t with the embedding of token t + 1."""
    states = network.project(true_features(network.feature_layers, family, request, tokens[:-1]))
    rows = [
        prefix.embeds[column] if prefix.visual[column] else network.embed_tokens(prefix.token_ids[column])
        for column in range(1, prefix.length)
    ]
    embeds = torch.stack([*rows, *network.embed_tokens(torch.tensor(tokens))])
    visual = [*prefix.visual[1:].tolist(), *(False for _ in tokens)]
    positions = pair_positions(network, prefix, len(embeds))
    return vision_heads.inputs_of(network, embeds, states, visual, positions)


@torch.no_grad()
def check_memory(family: str, tree: str, slots: int = 3, wanted: Sequence[Request] = (), kind: str = "eagle") -> None:
    """After every commit, the head's KV cache equals a fresh encoding of all inputs with the target's features."""
    engine = make_engine(kind, family, tree, slots)
    drafter: Any = engine.method.drafter
    for request in wanted or checks.requests(family, 10):
        engine.submit(request)
    num_compared = 0
    while engine.has_work:
        engine.step()
        for slot, progress in enumerate(engine._slots.progress):
            if progress is None:
                continue
            request = progress.request
            prefix = engine.target.encode(request.prompt, request.images, request.videos)
            pairs = true_pairs(drafter.network, family, request, prefix, progress.token_ids)
            length = len(pairs.rows)
            row = drafter.lanes.rows.first_of(slot)
            assert int(drafter.lanes.cache.lens[row]) == length, (int(drafter.lanes.cache.lens[row]), length)
            fresh = LaneModel(drafter.network, drafter.head, 1, 1, length)
            marks = torch.zeros(length, dtype=torch.long)
            whole = Prefix(marks, pairs.rows, pairs.positions, marks > 0)
            prefill = fresh.admit(SlotBatch(torch.zeros(1, dtype=torch.long), (0,), (0,)), [[whole]])
            for mine, theirs in zip(
                (*drafter.lanes.cache.keys, *drafter.lanes.cache.values),
                (*fresh.cache.keys, *fresh.cache.values),
                strict=True,
            ):
                torch.testing.assert_close(mine[row, :, :length], theirs[0, :, :length], atol=3e-4, rtol=1e-3)
            torch.testing.assert_close(drafter._output[slot], prefill.last[0], atol=3e-4, rtol=1e-3)
            num_compared += 1
    assert num_compared > 10


def children(tree: DraftTree, row: int, node: int) -> list[int]:
    """Tokens of a node's valid children, in draw order."""
    mine = (tree.parents[row] == node) & tree.valid[row]
    return tree.tokens[row][mine].tolist()


def line(tree: DraftTree, row: int, node: int) -> list[int]:
    """Drafted tokens from below the root down to a node."""
    parent = int(tree.parents[row, node])
    return [] if parent < 0 else [*line(tree, row, parent), int(tree.tokens[row, node])]


def check_drafts(kind: str, family: str, tree: str) -> None:
    """Every node's children equal those of a slow head, node by node, without batch, KV cache or tree."""
    engine = make_engine(kind, family, tree, 3)
    drafter: Any = engine.method.drafter
    slow = copy.deepcopy(NETWORKS.get(kind, eagle)(family))
    slow.set_attn_implementation("sdpa")
    counted = [0]

    def look(verification: VerificationOutput) -> None:
        made = verification.tree
        for row, slot in enumerate(verification.slots.ids):
            progress = engine._slots.progress[slot]
            assert progress is not None
            request, tokens = progress.request, progress.token_ids
            prefix = engine.target.encode(request.prompt, request.images, request.videos)
            if kind == "medusa":
                state = true_states(family, request, tokens[:-1])[-1]
                results = [drafter.heads.logits(head, state) for head in range(NUM_HEADS)]
            else:
                pairs = true_pairs(slow, family, request, prefix, tokens)
            for node in range(made.num_nodes):
                below = children(made, row, node)
                if not below or not made.valid[row, node]:
                    continue
                path = line(made, row, node)
                logits = results[len(path)] if kind == "medusa" else slow_logits(slow, drafter.head, pairs, path)
                best = logits.topk(len(below) + 1)
                if float((best.values[:-1] - best.values[1:]).min()) < 1e-3:
                    continue  # closer than rounding
                assert below == best.indices[:-1].tolist(), (request.sample_id, path)
                counted[0] += 1

    engine.method = replace(engine.method, acceptance=Watcher(look))
    checks.run(engine, checks.requests(family, 5))
    assert counted[0] > 40, counted


def slow_logits(network: FeatureStack, head: Any, pairs: Inputs, path: list[int]) -> Tensor:
    """The head's logits after a drafted path; each token is encoded with the output at the token before it."""
    if isinstance(network, Eagle3Network) and (mask := network.shape.mask_token_id) is not None:
        for _ in path:
            features = network.project(network.mask_hidden[0, 0])
            pairs = pairs.then(network, network.embed_tokens(torch.tensor(mask)), features)
        path = []
    for token in [*path, None]:
        output = network(pairs.rows[None], pairs.positions[..., None, :]).last_hidden_state[0, -1]
        if token is None:
            return head(output)
        pairs = pairs.then(network, network.embed_tokens(torch.tensor(token)), output)
    raise AssertionError("unreachable")
