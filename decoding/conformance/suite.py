"""Checks a method on a small random target: shapes and values of its parts, tokens, batches, and reads by the host.

The oracles share no code with the engine: transformers' `generate` of the target alone for greedy requests, and
`decoding.reference` for sampled ones. Equality is of tokens.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoding.conformance import toys
from decoding.conformance.contract import CheckedDrafter
from decoding.conformance.host_reads import check_host_reads
from decoding.conformance.values import CheckedAcceptanceValues, CheckedTreeValues
from decoding.contracts import Method
from decoding.engine import Engine
from decoding.noise import Stream
from decoding.reference import reference_tokens
from decoding.types import Completion, Request, Sampling
from models.inputs.prefix import Prefix
from models.target import Target

MAX_CONTEXT = 96
LONGEST = 26
GREEDY = Sampling()
PENALISED = Sampling(repetition_penalty=1.3, no_repeat_ngram_size=3)
SAMPLED = Sampling(temperature=0.8, top_k=12, top_p=0.95, repetition_penalty=1.1)
SEED = 11

MakeMethod = Callable[[Target], Method]
"""Makes the parts of a method anew, for one engine over the target."""


_ROOT = Path(__file__).resolve().parents[2]
_OURS = (str(_ROOT / "decoding"), str(_ROOT / "models"), str(_ROOT / "actors"))


class Deviation(Exception):
    """Raised by a check that fails; the message is a sentence."""


@dataclass(frozen=True)
class Result:
    """The outcome of one check: `problem` is empty if it passed, `note` is what was measured or not decided."""

    name: str
    problem: str = ""
    note: str = ""


def requests(count: int, sampling: Sampling) -> list[Request]:
    """Return prompts of 3 to 12 tokens with limits of 5 to 26 new tokens."""
    batch = []
    for number in range(count):
        generator = np.random.default_rng(number)
        words = [f"w{word}" for word in generator.integers(4, toys.VOCAB_SIZE, int(generator.integers(2, 12)))]
        limits = replace(sampling, max_new_tokens=5 + (7 * number) % (LONGEST - 4))
        batch.append(Request(f"sample-{number}", " ".join(["<s>", *words]), (), limits, seed=SEED))
    return batch


@cache
def expected(request: Request) -> tuple[int, ...]:
    """Return the tokens of the target alone: of `generate` if the request is greedy, else of the reference."""
    inputs = toys.front_end().encode(request.prompt, (), ())
    model: Any = toys.llama()
    eos_ids = frozenset({model.config.eos_token_id})
    if request.sampling.temperature > 0:
        return tuple(reference_tokens(model, inputs, request, eos_ids))
    sampling = request.sampling
    names = ("max_new_tokens", "repetition_penalty", "no_repeat_ngram_size")
    out = model.generate(**inputs, do_sample=False, **{name: getattr(sampling, name) for name in names})
    return tuple(out[0, inputs["input_ids"].shape[1] :].tolist())


def decode(method: Method, target: Target, slots: int, wanted: Sequence[Request]) -> dict[str, Completion]:
    """Decode requests and return the completions by sample id. Raises Deviation for a lost or failed request."""
    done = {completion.sample_id: completion for completion in Engine(target, method, slots, MAX_CONTEXT).run(wanted)}
    for request in wanted:
        if request.sample_id not in done:
            raise Deviation(f"{request.sample_id} was lost")
        if error := done[request.sample_id].error:
            raise Deviation(f"{request.sample_id} failed: {error.code}: {error.message}")
    return done


class Suite:
    """The checks of one method; `make` makes its parts, and `prompts_of` returns the drafter's prompts of a sample."""

    def __init__(self, make: MakeMethod, prompts_of: Callable[[Prefix], list[Prefix]] | None = None) -> None:
        self._make, self._prompts_of = make, prompts_of or (lambda _: [])
        self.rules: list[CheckedAcceptanceValues] = []

    def make_method(self) -> Method:
        """Return a new method over the toy target."""
        return self._make(toys.target())

    def checked(self, target: Target) -> Method:
        """Return a new method whose parts run inside proxies that check shapes and values."""
        method = self._make(target)
        drafter_name, tree_name, rule_name = map(_title, (method.drafter, method.tree, method.acceptance))
        rule = CheckedAcceptanceValues(method.acceptance, rule_name)
        self.rules.append(rule)
        drafter: Any = method.drafter
        if drafter.name != "none":
            drafter = CheckedDrafter(drafter, drafter_name)
        tree: Any = CheckedTreeValues(method.tree, tree_name)
        return replace(method, drafter=drafter, tree=tree, acceptance=rule)  # type: ignore[arg-type]

    def check_output(self, sampling: Sampling, slots: int, count: int) -> str:
        """Compare the tokens of requests with those of the target alone, or, of a rule that is not lossless, with those
        of the same request alone in an engine."""
        target = toys.target()
        wanted = requests(count, sampling)
        done = decode(self.checked(target), target, slots, wanted)
        rule = self.rules[-1]
        draws_alike = rule.draft_stream == Stream.TOKEN
        for request in wanted:
            tokens = done[request.sample_id].token_ids
            if rule.lossless and (draws_alike or sampling.temperature == 0):
                right, origin = expected(request), "the target alone"
            else:
                alone = decode(self.checked(target), target, 1, [request])
                right, origin = alone[request.sample_id].token_ids, "the same request alone"
            if tokens != right:
                pairs = enumerate(zip(tokens, right))
                index = next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(right)))
                raise Deviation(
                    f"in a batch of {slots}, token {index} of {request.sample_id} differs from {origin}: "
                    f"{list(tokens[index : index + 3])}, not {list(right[index : index + 3])}"
                )
        if rule.lossless and not draws_alike and sampling.temperature > 0:
            return "the distribution of sampled tokens is not decided: drafts have noise of their own"
        return ""

    def check_steps(self) -> str:
        """Run steps on tensors without values."""
        try:
            check_host_reads(self._make, self._prompts_of)
        except Exception as error:  # torch raises many types
            what = "a step reads a value on the host, or copies one to the device"
            raise Deviation(f"{what}: {_first_line(error)}") from None
        return ""

    def check_repeats(self) -> str:
        """Decode the same requests twice, each time with new parts."""
        target = toys.target()
        wanted = requests(5, SAMPLED)
        first, second = (decode(self.checked(target), target, 3, wanted) for _ in range(2))
        for request in wanted:
            if first[request.sample_id].token_ids != second[request.sample_id].token_ids:
                raise Deviation(f"{request.sample_id} has other tokens when the same requests are decoded again")
        return ""


def _title(part: Any) -> str:
    """Return the class name of a part, also inside a proxy of `contract`."""
    return getattr(part, "title", type(part).__name__)


def _first_line(error: Exception) -> str:
    """Return the type and the first line of an error, and the last line of code that is a user's."""
    lines = str(error).strip().splitlines() or [""]
    locations = [
        f"; {frame.filename}, line {frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OURS) and "site-packages" not in frame.filename
    ]
    return f"{type(error).__name__}: {lines[0]}{locations[-1] if locations else ''}"


Check = Callable[[Suite], str]
"""Runs a check and returns a note; raises Deviation, or an error of a part."""


def _output(sampling: Sampling, slots: int, count: int) -> Check:
    return lambda suite: suite.check_output(sampling, slots, count)


QUICK: dict[str, Check] = {
    "greedy tokens, batch 3": _output(GREEDY, 3, 5),
    "no host reads in a step": Suite.check_steps,
}
"""Checks before a job starts; they take about a second."""
ALL: dict[str, Check] = {
    **{f"greedy tokens, batch {slots}": _output(GREEDY, slots, 12) for slots in (1, 3, 9)},
    "tokens under penalties, batch 3": _output(PENALISED, 3, 8),
    **{f"sampled tokens, batch {slots}": _output(SAMPLED, slots, 12) for slots in (1, 3, 9)},
    "the same tokens again": Suite.check_repeats,
    "no host reads in a step": Suite.check_steps,
}
"""All checks of `check-method`."""


def run(suite: Suite, checks: dict[str, Check]) -> list[Result]:
    """Run checks, all of them, and return one result for each. They use one thread: the models are tiny, and threads
    wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = [_result(suite, name, check) for name, check in checks.items()]
    finally:
        torch.set_num_threads(num_threads)
    return results


def _result(suite: Suite, name: str, check: Check) -> Result:
    suite.rules.clear()
    try:
        note = check(suite)
    except Exception as error:  # the parts are a user's
        return Result(name, str(error) if isinstance(error, Deviation) else _first_line(error))
    num_judged = sum(rule.num_judged for rule in suite.rules)
    num_accepted = sum(rule.num_accepted for rule in suite.rules)
    if num_judged and not note:
        note = f"acceptance length {1 + num_accepted / num_judged:.2f}"
        note += "" if num_accepted else ", no draft was accepted"
    return Result(name, note=note)
