"""Checks of every method. Tests run them, and planted faults must make them fail.

Each check runs an engine on toy models and compares tokens with an oracle that shares no code with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from decoding import Completion, Engine, Method, Request, Sampling, Telemetry
from decoding.acceptance import Exact, Rejection
from decoding.contexts import Full
from decoding.contracts import Acceptance, Drafter, PrefillOutput, TreePolicy, VerificationOutput
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.reference import next_logits, reference_tokens
from decoding.tree import AcceptanceResult
from decoding.trees import Chain, StaticTree, branching_paths
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch
from tests import toys

RAGGED_PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0)]

TREES: dict[str, Callable[[], TreePolicy]] = {
    "chain": lambda: Chain(4),
    "branching": lambda: StaticTree(branching_paths([3, 2, 2])),
    "ragged": lambda: StaticTree(RAGGED_PATHS),
}


def make_drafter(kind: str, family: str) -> Drafter:
    """`none`, `right` (the target itself), `perturbed` (often right), `loose` (less often), `wrong` (unrelated)."""
    if kind == "none":
        return NoDrafter()
    model = {
        "right": lambda: toys.target(family),
        "perturbed": lambda: toys.perturbed(family, 0.02),
        "loose": lambda: toys.perturbed(family, 0.06),
        "wrong": lambda: toys.target(family, seed=7),
    }[kind]()
    return ModelDrafter(model, [Full()], toys.VOCAB_SIZE)


class Recorder:
    """Wraps an acceptance rule and records its decisions: accepted depth, offered depth, sibling ranks."""

    def __init__(self, rule: Acceptance) -> None:
        self.rule = rule
        self.lossless = rule.lossless
        self.draft_stream = rule.draft_stream
        self.needs_draft_probs = rule.needs_draft_probs
        self.needs_hidden = rule.needs_hidden
        self.open = rule.open
        self.admit = rule.admit
        self.rejected_at: set[int] = set()
        self.ranks_taken: set[int] = set()

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        result = self.rule.accept(verification)
        ranks = verification.tree.sibling_rank()
        for row, n in enumerate(result.n.tolist()):
            last = int(result.path[row, n - 1])
            has_children = bool(((verification.tree.parents[row] == last) & verification.tree.valid[row]).any())
            if has_children:
                self.rejected_at.add(n)
            self.ranks_taken |= {int(ranks[row, node]) for node in result.path[row, 1:n]}
        return result


def requests(family: str, count: int, sampling: Sampling | None = None, longest: int = 26) -> list[Request]:
    """Prompts of different lengths and limits, every third with a video; without `sampling` they are greedy."""
    base = sampling or Sampling()
    made = []
    for i in range(count):
        text, images = toys.prompt(family, i)
        text, videos = toys.with_video(family, text, i) if i % 3 == 1 else (text, ())
        limits = replace(base, max_new_tokens=5 + (7 * i) % (longest - 4))
        made.append(Request(f"sample-{i}", text, images, limits, seed=11, videos=videos))
    return made


def run(engine: Engine, wanted: Sequence[Request]) -> dict[str, Completion]:
    """All completions by sample id; every request must come back exactly once, without an error."""
    done = list(engine.run(wanted))
    assert sorted(c.sample_id for c in done) == sorted(r.sample_id for r in wanted), "lost or doubled requests"
    assert not [c.error for c in done if c.error], [c.error for c in done if c.error]
    return {c.sample_id: c for c in done}


@cache
def _generated(family: str, request: Request, eos_ids: frozenset[int]) -> tuple[int, ...]:
    inputs = toys.front_end(family).encode(request.prompt, request.images, request.videos)
    options = generate_options(request.sampling)
    out: Any = toys.oracle(family).generate(**inputs, **options, eos_token_id=sorted(eos_ids))  # type: ignore[operator]
    return tuple(out[0, inputs["input_ids"].shape[1] :].tolist())


def generate_options(sampling: Sampling) -> dict[str, Any]:
    """The options of transformers' `generate` for a greedy request."""
    lists = {
        "bad_words_ids": [list(words) for words in sampling.bad_words_ids],
        "sequence_bias": [[list(tokens), bias] for tokens, bias in sampling.sequence_bias],
        "suppress_tokens": list(sampling.suppress_tokens),
        "begin_suppress_tokens": list(sampling.begin_suppress_tokens),
        "forced_eos_token_id": list(sampling.forced_eos_token_id),
    }
    names = ("max_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "forced_bos_token_id")
    lengths = {name: getattr(sampling, name) for name in ("min_new_tokens", "min_length")}
    return {
        "do_sample": False,
        **{name: getattr(sampling, name) for name in names},
        **{name: values or None for name, values in (lists | lengths).items()},
    }


def generated(family: str, request: Request, eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Greedy output of transformers' `generate` for the target alone."""
    # Arrays cannot be hashed; the prompt's text identifies its images.
    return _generated(family, _Hashable.of(request), eos_ids)


@cache
def _referenced(family: str, request: Request, eos_ids: frozenset[int]) -> tuple[int, ...]:
    inputs = toys.front_end(family).encode(request.prompt, request.images, request.videos)
    return tuple(reference_tokens(toys.oracle(family), inputs, request, eos_ids))


def referenced(family: str, request: Request, eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Output of the slow reference, greedy or sampled."""
    return _referenced(family, _Hashable.of(request), eos_ids)


class _Hashable(Request):
    """A request that is hashed without its images."""

    @classmethod
    def of(cls, request: Request) -> _Hashable:
        return cls(**{name: getattr(request, name) for name in request.__dataclass_fields__})

    def __hash__(self) -> int:
        return hash((self.sample_id, self.prompt, self.sampling, self.seed, self.replica, self.attempt))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and hash(self) == hash(other)


def check_telemetry(completion: Completion) -> None:
    """generated = 1 + kept accepted + steps − (1 if the last step ended inside its path), exactly."""
    telemetry = completion.telemetry
    inside = int(telemetry.ended_inside_path)
    expected = 1 + telemetry.num_accepted_draft_tokens + telemetry.num_spec_steps - inside
    assert len(completion.token_ids) == expected, (completion.sample_id, telemetry)
    assert sum(telemetry.acceptance_histogram) == telemetry.num_spec_steps
    assert telemetry.num_accepted_draft_tokens <= telemetry.num_draft_tokens
    assert telemetry.target_forwards == 1 + telemetry.num_spec_steps


def check_greedy(
    family: str, tree: str, drafter: str, slots: int, count: int = 9, rule: Acceptance | None = None
) -> Recorder:
    """Greedy output equals transformers' `generate` of the target alone, token for token."""
    target = toys.target(family)
    recorder = Recorder(rule or Exact())
    engine = Engine(target, Method(make_drafter(drafter, family), TREES[tree](), recorder), slots, 128)
    wanted = requests(family, count)
    done = run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == generated(family, request, target.eos_ids), request.sample_id
        check_telemetry(done[request.sample_id])
    if drafter == "right" and tree == "chain":
        # Drafts of the target itself are all accepted.
        for completion in done.values():
            telemetry = completion.telemetry
            assert telemetry.ended_inside_path or telemetry.num_accepted_draft_tokens == telemetry.num_draft_tokens, (
                telemetry
            )
    return recorder


def check_sampled(family: str, tree: str, drafter: str, slots: int, sampling: Sampling, count: int = 9) -> float:
    """Shared-noise sampling equals the slow reference token for token; returns the mean acceptance length."""
    target = toys.target(family)
    engine = Engine(target, Method(make_drafter(drafter, family), TREES[tree](), Exact()), slots, 128)
    wanted = requests(family, count, sampling)
    done = run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == referenced(family, request, target.eos_ids), request.sample_id
        check_telemetry(done[request.sample_id])
    return sum(c.telemetry.mean_acceptance_length for c in done.values()) / len(done)


def check_eos_at_every_depth(family: str, tree: str) -> None:
    """A text ends at its EOS as first token, at each depth of the tree, and as the bonus token."""
    depths_seen = set()
    base = Request("eos", *toys.prompt(family, 3), Sampling(max_new_tokens=16))
    full = generated(family, base, frozenset())
    for index in range(len(full)):
        eos_ids = frozenset([full[index]])
        expected = full[: full.index(full[index]) + 1]
        target = toys.target(family)
        target.eos_ids = eos_ids
        engine = Engine(target, Method(make_drafter("right", family), TREES[tree](), Exact()), 2, 128)
        others = [
            replace(base, sample_id=f"other-{i}", prompt=toys.prompt(family, i)[0], images=toys.prompt(family, i)[1])
            for i in range(3)
        ]
        done = run(engine, [base, *others])
        assert done["eos"].token_ids == expected, (index, done["eos"].token_ids, expected)
        assert done["eos"].finish_reason == ("stop" if expected[-1] in eos_ids else "length")
        for request in others:
            assert done[request.sample_id].token_ids == generated(family, request, eos_ids)
        for completion in done.values():
            check_telemetry(completion)
        telemetry = done["eos"].telemetry
        if telemetry.ended_inside_path:
            depths_seen.add(
                next(
                    i for i in reversed(range(len(telemetry.acceptance_histogram))) if telemetry.acceptance_histogram[i]
                )
            )
    assert depths_seen, "no text ended inside a path"


def check_cache(family: str, tree: str, drafter: str) -> None:
    """After every commit, each row's KV cache equals a fresh prefill of its tokens, for target and drafter."""
    target = toys.target(family)
    guess = make_drafter(drafter, family)
    engine = Engine(target, Method(guess, TREES[tree](), Exact()), 3, 128)
    wanted = requests(family, 20)
    for request in wanted:
        engine.submit(request)
    num_compared = 0
    while engine.has_work:
        engine.step()
        for slot, progress in enumerate(engine._slots.progress):
            if progress is None:
                continue
            committed = progress.token_ids[:-1]
            prefix = target.encode(progress.request.prompt, progress.request.images, progress.request.videos)
            compare_row(engine._lanes, engine._lanes.rows.first_of(slot), prefix, committed)
            if isinstance(guess, ModelDrafter):
                held = len(progress.token_ids) - int(guess._num_pending[slot])
                own = guess.prefixes(progress.request, PrefillOutput(prefix))[0]
                compare_row(guess.lanes, guess.lanes.rows.first_of(slot), own, progress.token_ids[:held])
            num_compared += 1
    assert num_compared > 10


def compare_row(lanes: LaneModel, row: int, prefix: Prefix, tokens: Sequence[int]) -> None:
    length = prefix.length + len(tokens)
    assert int(lanes.cache.lens[row]) == length, (row, int(lanes.cache.lens[row]), length)
    fresh = LaneModel(lanes.decoder, lanes.head, 1, 1, length)
    more = torch.tensor(tokens, dtype=torch.long)
    with torch.inference_mode():
        embeds = torch.cat([prefix.embeds, lanes.decoder.get_input_embeddings()(more)])
    later = prefix.positions[..., -1:] + 1 + torch.arange(len(tokens))
    positions = torch.cat([prefix.positions, later], dim=-1)
    visual = torch.cat([prefix.visual, torch.zeros(len(tokens), dtype=torch.bool)])
    whole = Prefix(torch.cat([prefix.token_ids, more]), embeds, positions, visual, prefix.deepstack)
    with torch.inference_mode():
        fresh.admit(SlotBatch(torch.zeros(1, dtype=torch.long), (0,), (0,)), [[whole]])
    for mine, theirs in zip(
        (*lanes.cache.keys, *lanes.cache.values), (*fresh.cache.keys, *fresh.cache.values), strict=True
    ):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine[row, :, :length], theirs[0, :, :length], atol=2e-4, rtol=1e-4)


def check_independence(family: str, tree: str, sampling: Sampling, count: int = 8) -> None:
    """A sample's output does not depend on batch size, order or slot."""
    wanted = requests(family, count, sampling)
    outputs = []
    for slots, order in ((1, wanted), (3, wanted[::-1]), (8, wanted[4:] + wanted[:4])):
        method = Method(make_drafter("perturbed", family), TREES[tree](), Exact())
        done = run(Engine(toys.target(family), method, slots, 128), order)
        outputs.append({key: (c.token_ids, c.text, c.telemetry.acceptance_histogram) for key, c in done.items()})
    assert outputs[0] == outputs[1] == outputs[2]


def joint_of_two_tokens(
    tree: Callable[[], TreePolicy], rule: Acceptance, count: int, drafter: str | Drafter = "perturbed"
) -> float:
    """Chi-square statistic, per degree of freedom, of three sampled tokens against the target's own probabilities.

    The first token comes from the prefill, the second and third from one verify step. The right distribution
    gives a statistic near 1, with the standard deviation √(2 / dof).
    """
    prompt, _ = toys.prompt("llama", 5)
    sampling = Sampling(max_new_tokens=3, temperature=1.4, top_k=3, ignore_eos=True)
    wanted = [Request(f"draw-{i}", prompt, (), sampling, seed=3) for i in range(count)]
    made = make_drafter(drafter, "llama") if isinstance(drafter, str) else drafter
    engine = Engine(toys.target("llama"), Method(made, tree(), rule), 256, 64)
    seen: dict[tuple[int, ...], int] = {}
    for completion in run(engine, wanted).values():
        seen[completion.token_ids] = seen.get(completion.token_ids, 0) + 1
    expected = _joint(prompt, sampling)
    assert set(seen) <= set(expected), "a token that the filter removes was drawn"
    used = {tokens: p for tokens, p in expected.items() if p * count >= 5}
    rare = 1.0 - sum(used.values())
    statistic = sum((seen.get(tokens, 0) - p * count) ** 2 / (p * count) for tokens, p in used.items())
    if rare * count >= 5:
        num_rare = sum(n for tokens, n in seen.items() if tokens not in used)
        statistic += (num_rare - rare * count) ** 2 / (rare * count)
    assert len(used) >= 15, "too few cells to tell anything"
    return statistic / (len(used) - 1)


@cache
@torch.inference_mode()
def _joint(prompt: str, sampling: Sampling) -> dict[tuple[int, ...], float]:
    inputs = toys.front_end("llama").encode(prompt, ())
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(sampling.max_new_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, p in joint.items():
            logits = next_logits(toys.oracle("llama"), inputs, list(tokens)) / sampling.temperature
            best = logits.topk(sampling.top_k)
            for token, share in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*tokens, token)] = p * share
        joint = longer
    return joint


def run_rejection(drafter: str, sampling: Sampling) -> Telemetry:
    """Telemetry of one sampled text under rejection along a chain."""
    engine = Engine(toys.target("llama"), Method(make_drafter(drafter, "llama"), Chain(4), Rejection()), 1, 128)
    request = Request("one", toys.prompt("llama", 1)[0], (), replace(sampling, ignore_eos=True))
    return run(engine, [request])["one"].telemetry


def check_stop_strings(family: str) -> None:
    """A stop string ends the text and is cut off; a draft or the target's own token may complete it."""
    base = Request("stopped", *toys.prompt(family, 2), Sampling(max_new_tokens=20, ignore_eos=True))
    full = generated(family, base, frozenset())
    decode = toys.front_end(family).decode
    reasons = set()
    for index in range(1, len(full)):
        stop = decode(full[index - 1 : index + 1])
        if not stop:
            continue  # two special tokens in a row have no text
        request = replace(base, sampling=replace(base.sampling, stop=(stop,)))
        method = Method(make_drafter("right", family), Chain(4), Exact())
        done = run(Engine(toys.target(family), method, 1, 128), [request])["stopped"]
        text = decode(full)
        ending = next(n for n in range(1, len(full) + 1) if stop in decode(full[:n]))
        assert done.text == text[: text.index(stop)], (done.text, stop)
        assert done.token_ids == full[:ending]
        assert done.finish_reason == "stop_string"
        check_telemetry(done)
        reasons.add(done.telemetry.ended_inside_path)
    assert reasons == {True, False}, "stops by a draft and by a bonus token have to occur"
