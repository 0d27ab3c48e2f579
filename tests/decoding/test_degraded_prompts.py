"""Tests that a row whose drafter prompt fails loses only its drafts: its tokens equal those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Rejection
from decoding.contexts import Caption, Full, Pooled, Pruned
from decoding.contracts import Context
from decoding.drafters import ModelDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.drafters.guarded import guarded
from decoding.trees import Chain
from models.inputs.processing import FrontEnd, PromptError
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.conformance.methods import METHODS
from tests.decoding.failing_drafter import FailingDrafter

pytestmark = pytest.mark.slow

SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2)
NUM_ROWS = 7


def run(
    method: Method, family: str, wanted: list[Request], slots: int = 3, context: int = 128
) -> dict[str, Completion]:
    made = guarded(method)
    engine = Engine(toys.target(family), made, slots, context)
    if isinstance(method.drafter, FailingDrafter):
        method.drafter.engine = engine
    done = checks.run(engine, wanted)
    assert len(engine._slots.free) == slots
    for completion in done.values():
        checks.check_telemetry(completion)
    return done


def plain(family: str, wanted: list[Request]) -> dict[str, Completion]:
    return run(METHODS["plain"][0](family), family, wanted)


def check(done: dict[str, Completion], family: str, wanted: list[Request], failed: set[str], reason: str) -> None:
    """Tokens of plain decoding, and exactly the rows `failed` without drafts."""
    expected = plain(family, wanted)
    for name, completion in done.items():
        assert completion.token_ids == expected[name].token_ids, name
        telemetry = completion.telemetry
        # A text of one token ends before anything is drafted for it.
        assert telemetry.degraded == (name in failed and telemetry.num_spec_steps > 0), name
        assert telemetry.num_draft_tokens == 0 or name not in failed
        assert reason in telemetry.extras.get("drafter_error", reason if not telemetry.degraded else "")
    sound = [completion.telemetry for name, completion in done.items() if name not in failed]
    assert not sound or sum(telemetry.num_draft_tokens for telemetry in sound) > 0


def some(request: Request) -> bool:
    return int(request.sample_id.rpartition("-")[2]) % 3 == 1


ERRORS = {
    PromptError: "prompt_refused",
    KeyError: "drafter_failed",
    torch.OutOfMemoryError: "out_of_memory",
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize(
    ("name", "family", "where"),
    [
        ("sd-chain", "llava", "prefixes"),
        ("sd-chain", "llama", "prefill"),
        ("sd-tree", "qwen2_5_vl", "prefill"),
        ("tabed-tree", "llava", "prefixes"),
        ("tabed-inverse", "llava", "prefill"),
        ("sage", "llava", "prefixes"),
        ("sage-online", "llama", "prefill"),
        ("dynamic", "llama", "prefixes"),
        ("eagle", "llama", "prefill"),
        ("lookup", "llama", "prefixes"),
        ("medusa", "llama", "prefixes"),
    ],
)
def test_any_failure_of_the_drafters_prompt_costs_the_row_its_drafts_alone(
    name: str, family: str, where: str, error: type[Exception]
) -> None:
    for slots, sampling in ((3, Sampling()), (1, SAMPLED), (NUM_ROWS, SAMPLED)):
        wanted = checks.requests(family, NUM_ROWS, sampling)
        method = METHODS[name][0](family)
        sick = FailingDrafter(method.drafter, some, raises_in=where, error=error)
        done = run(replace(method, drafter=sick), family, wanted, slots)
        check(done, family, wanted, {request.sample_id for request in wanted if some(request)}, ERRORS[error])


@pytest.mark.parametrize("name", ["sd-chain", "tabed-tree", "eagle", "sage-online"])
@pytest.mark.parametrize("where", ["prefixes", "prefill"])
def test_where_every_prompt_fails_all_rows_are_decoded_plainly(name: str, where: str) -> None:
    family = METHODS[name][1][0]
    wanted = checks.requests(family, NUM_ROWS)
    method = METHODS[name][0](family)
    sick = FailingDrafter(method.drafter, lambda _: True, raises_in=where)
    done = run(replace(method, drafter=sick), family, wanted)
    check(done, family, wanted, set(done), "drafter_failed")


def test_a_slot_drafts_again_for_the_sample_after_one_without_drafts() -> None:
    wanted = checks.requests("llama", NUM_ROWS)
    method = METHODS["sd-chain"][0]("llama")
    alone = run(METHODS["sd-chain"][0]("llama"), "llama", wanted, 1)
    sick = FailingDrafter(method.drafter, some, raises_in="prefixes", error=PromptError)
    done = run(replace(method, drafter=sick), "llama", wanted, 1)
    for request in wanted:
        if not some(request):
            # What a failed neighbour left behind would show in what is accepted.
            telemetry = done[request.sample_id].telemetry
            assert telemetry.acceptance_histogram == alone[request.sample_id].telemetry.acceptance_histogram


def test_no_memory_for_any_of_several_prompts_is_not_the_rows_fault() -> None:
    method = METHODS["sd-chain"][0]("llama")
    sick = FailingDrafter(method.drafter, lambda _: True, raises_in="prefill", error=torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        run(replace(method, drafter=sick), "llama", checks.requests("llama", NUM_ROWS), 3)


def test_rejection_of_a_row_without_drafts_takes_the_targets_choice() -> None:
    wanted = checks.requests("llama", NUM_ROWS)
    sick = FailingDrafter(checks.make_drafter("right", "llama"), some, raises_in="prefixes", error=PromptError)
    done = run(Method(sick, Chain(3), Rejection()), "llama", wanted)
    check(done, "llama", wanted, {request.sample_id for request in wanted if some(request)}, "prompt_refused")


# --- each context, and what is before it -----------------------------------------------------------------------------


def drafting(family: str, contexts: list[Context], model: Target | None = None) -> Method:
    merge = Ensemble(EnsembleOptions("matches", steps=4)) if len(contexts) > 1 else None
    made = model or toys.perturbed(family, 0.02)
    return Method(ModelDrafter(made, contexts, toys.VOCAB_SIZE, merge), Chain(4), Exact())


class Odd:
    """A captioner that fails on tall pictures, or returns captions that are too long."""

    def __init__(self, words: str | None) -> None:
        self.words = words

    def caption(self, image: NDArray[np.uint8]) -> str:
        if image.shape[1] % 2:
            if self.words is None:
                raise RuntimeError("no beams left")
            return self.words
        return "w20 w21"


def shows_odd(request: Request) -> bool:
    return any(image.shape[1] % 2 for image in request.images)


@pytest.mark.parametrize(("words", "reason"), [(None, "drafter_failed"), (" ".join(["w30"] * 200), "context_too_long")])
@pytest.mark.parametrize("more", [[], [Full()]], ids=["alone", "with the whole"])
def test_a_caption_that_fails_or_is_too_long(more: list[Context], words: str | None, reason: str) -> None:
    wanted = checks.requests("llava", 9)
    failed = {request.sample_id for request in wanted if shows_odd(request)}
    assert 0 < len(failed) < 9
    done = run(drafting("llava", [*more, Caption(Odd(words))]), "llava", wanted)  # type: ignore[arg-type]
    check(done, "llava", wanted, failed, reason)


class Picky:
    """A processor that fails on rows with several pictures, with an error that no processor should raise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *given: Any, **named: Any) -> Any:
        if len(named.get("images", ())) > 1:
            raise KeyError("pixel_values")
        return self.inner(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("context", [Full(), Pooled(), Pruned(0.5), Pruned(0.7, positions="compact")])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_drafters_processor_that_fails(family: str, context: Context) -> None:
    model = toys.perturbed(family, 0.02)
    model.front_end = FrontEnd(Picky(toys.processor(family)))
    wanted = checks.requests(family, 9)
    failed = {request.sample_id for request in wanted if len(request.images) > 1}
    assert 0 < len(failed) < 9
    check(run(drafting(family, [context], model), family, wanted), family, wanted, failed, "prompt_refused")


def test_guided_pruning_of_other_columns_than_the_targets_decodes_the_row_without_drafts() -> None:
    """The drafter looks at tiles of the picture, the target at one square."""
    wanted = checks.requests("llava", 6)
    failed = {request.sample_id for request in wanted if request.images}
    assert 0 < len(failed) < 6
    method = drafting("llava", [Pruned(0.5, "attention")], toys.target("llava_next"))
    check(run(method, "llava", wanted, context=256), "llava", wanted, failed, "prompt_refused")


def test_a_drafters_prompt_is_held_to_the_last_column() -> None:
    """The longest caption that fits is drafted for; one word more is not."""
    picture = toys.picture(1)
    request = Request("one", "<s> w5 <image> w6", (picture,), Sampling(max_new_tokens=10, ignore_eos=True))
    room = 40 - 10
    for num_words, fits in ((room - 3, True), (room - 2, False)):
        words = " ".join(["w30"] * num_words)
        method = drafting("llava", [Caption(Odd(words), lead="")])  # type: ignore[arg-type]
        assert picture.shape[1] % 2
        done = run(method, "llava", [request], 1, 40)
        check(done, "llava", [request], set() if fits else {"one"}, "context_too_long: the drafter's prompt has")
        assert done["one"].telemetry.degraded != fits
