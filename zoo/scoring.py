"""Functions shared by the measures of the zoo's pairs: decodes texts by the engine, scores them, renders tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from decoding import Completion, Engine, Method, Request
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.world.grammar import stated

NUM_DRAFTED = 5
SLOTS = 25
ROLES = ("target", "drafter")


def load_targets(folder: Path, part: str) -> dict[str, Target]:
    """Load both models of a pair in float32, by role."""
    return {role: Target.load(CheckpointRef(str(folder / f"{part}_{role}")), "float32") for role in ROLES}


def decode(model: Target, requests: Sequence[Request], drafter: Target | None = None) -> list[Completion]:
    """Return completions in the order of their requests, decoded plainly or with a drafter's chains.

    Raises:
        RuntimeError: a request failed.
    """
    method = Method(NoDrafter(), Chain(1), Exact())
    if drafter is not None:
        method = Method(ModelDrafter(drafter, [Full()], model.vocab_size), Chain(NUM_DRAFTED), Exact())
    done = {one.sample_id: one for one in Engine(model, method, SLOTS, 512).run(requests)}
    failed = [one.error for one in done.values() if one.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return [done[request.sample_id] for request in requests]


def count_stated(truth: str, text: str) -> tuple[int, int]:
    """Return how many attribute words of a text equal the true text's at the same position, and the larger of both
    counts."""
    true, found = stated(truth), stated(text)
    return sum(one == other for one, other in zip(true, found)), max(len(true), len(found))


def measure_texts(
    pair: dict[str, Target],
    requests: Callable[[Target], Sequence[Request]],
    score: Callable[[int, str], tuple[bool, tuple[int, int]]],
    noun: str,
) -> dict[str, float]:
    """Measure both models on the same requests, and the acceptance length of the pair.

    `score` maps a request's index and a text to (whether it is right, (right attributes, all attributes)).

    Raises:
        RuntimeError: a request failed, or speculative texts differ from plain ones.
    """
    plain = {role: decode(model, requests(model)) for role, model in pair.items()}
    found: dict[str, float] = {}
    for role, done in plain.items():
        right, counts = zip(*(score(index, one.text) for index, one in enumerate(done)))
        found[f"{role}_{noun}s_right"] = sum(right) / len(done)
        found[f"{role}_attributes_right"] = sum(one for one, _ in counts) / sum(whole for _, whole in counts)
    found[f"mean_{noun}_tokens"] = sum(len(one.token_ids) for one in plain["target"]) / len(plain["target"])
    drafted = decode(pair["target"], requests(pair["target"]), pair["drafter"])
    if [one.text for one in drafted] != [one.text for one in plain["target"]]:
        raise RuntimeError(f"speculative {noun}s differ from plain ones")
    steps = sum(one.telemetry.num_spec_steps for one in drafted)
    found["mean_acceptance_length"] = 1 + sum(one.telemetry.num_accepted_draft_tokens for one in drafted) / steps
    return found


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def value_table(title: str, rows: Iterable[tuple[str, str]], measured: dict[str, float]) -> str:
    """Render measured numbers as a Markdown table, from rows of (text, key)."""
    return markdown_table((title, "value"), [(name, f"{measured[key]:.3f}") for name, key in rows])
