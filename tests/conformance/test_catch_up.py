"""A drafter that was off for any pattern of steps gives the drafts of one that was never off.

Oracles: the drafter's model over the whole text, a slow head node by node, and a fresh prefill.
"""

from __future__ import annotations

from collections.abc import Container

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import decoding.drafters.missed as missed_module
import decoding.drafters.model as missed
from decoding import Engine, Method, Request
from decoding.acceptance import Exact
from decoding.contracts import PrefillOutput
from decoding.drafters import LookupDrafter, ModelDrafter
from decoding.drafters.model import catch_up_widths
from decoding.trees import Chain
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from tests import toys
from tests.conformance import checks, heads
from tests.conformance.catch_up import LONG, MIXED, check_chains, late_engine, long_requests, unsettled_engine
from tests.conformance.erratic import Erratic, unsettled

pytestmark = pytest.mark.slow

PATTERNS = st.lists(st.integers(0, 4), min_size=2, max_size=9).filter(any)


@settings(max_examples=12, deadline=None)
@given(PATTERNS)
@example(LONG)
@example(MIXED)
def test_a_models_drafts_are_those_of_the_whole_text_after_any_pattern(pattern: list[int]) -> None:
    check_chains(pattern)


def test_drafts_after_many_steps_without_drafting_are_compared() -> None:
    assert check_chains(LONG) > 10


@pytest.mark.parametrize("widest", [2, 4, missed.WIDEST])
def test_tokens_that_exceed_one_forward_are_caught_up_in_several(widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed, "WIDEST", widest)
    assert check_chains(LONG) > 10


@pytest.mark.parametrize("pattern", [LONG, MIXED, [1, 0]], ids=str)
@pytest.mark.parametrize("family", ["llama", "llava"])
def test_the_drafters_kv_cache_equals_a_fresh_prefill_after_every_draft(family: str, pattern: list[int]) -> None:
    engine, drafter = unsettled_engine(pattern, family)
    for request in checks.requests(family, 9):
        engine.submit(request)
    num_compared = 0
    while engine.has_work:
        engine.step()
        for slot, progress in enumerate(engine._slots.progress):
            if progress is None or progress.unread is not None:
                continue
            pending = int(drafter._num_pending[slot])
            assert pending <= drafter._most_pending[slot]
            held = len(progress.token_ids) - pending
            assert drafter._pending[slot, :pending].tolist() == progress.token_ids[held:]
            target_prefix = engine.target.encode(
                progress.request.prompt, progress.request.images, progress.request.videos
            )
            own = drafter.prefixes(progress.request, PrefillOutput(target_prefix))[0]
            checks.compare_row(drafter.lanes, drafter.lanes.rows.first_of(slot), own, progress.token_ids[:held])
            num_compared += held > 0
    assert num_compared > 5


def test_the_drafter_runs_no_forward_without_drafts() -> None:
    engine, drafter = unsettled_engine([0])
    done = checks.run(engine, checks.requests("llama", 6))
    assert drafter.num_forwards == 0
    assert all(completion.telemetry.drafter_forwards == 0 for completion in done.values())
    assert all(completion.telemetry.num_draft_tokens == 0 for completion in done.values())
    extras = [completion.telemetry.extras["controller"] for completion in done.values() if completion.telemetry.extras]
    assert {result["levels_max"] for result in extras} == {0}
    assert sum(result["num_off_steps"] for result in extras) > 10


def test_a_drafter_that_is_off_prepares_no_prompts() -> None:
    engine, drafter = unsettled_engine([0], "llava")
    made = count_prompts(drafter)
    checks.run(engine, checks.requests("llava", 6))
    assert made == []
    engine, drafter = unsettled_engine([4], "llava")
    made = count_prompts(drafter)
    going = [
        completion
        for completion in checks.run(engine, checks.requests("llava", 6)).values()
        if len(completion.token_ids) > 1
    ]
    assert sorted(made) == sorted(completion.sample_id for completion in going)


@pytest.mark.parametrize("refused", [{"sample-1", "sample-3"}, {f"sample-{number}" for number in range(5)}], ids=len)
@pytest.mark.parametrize("pattern", [[4], [0, 0, 2], LONG], ids=str)
def test_a_prompt_that_the_drafter_refuses_late_disables_drafts_of_its_row_only(
    pattern: list[int], refused: set[str]
) -> None:
    wanted = long_requests()
    expected = checks.run(unsettled_engine([0])[0], wanted)
    engine, drafter = unsettled_engine(pattern)
    count_prompts(drafter, refused)
    completions = list(engine.run(wanted))
    done = {completion.sample_id: completion for completion in completions}
    assert len(completions) == len(done) == len(expected)
    for name, completion in done.items():
        assert completion.error is None
        assert completion.token_ids == expected[name].token_ids
        assert completion.telemetry.degraded == (name in refused)
        if name in refused:
            assert completion.telemetry.num_draft_tokens == 0
            assert completion.telemetry.extras["drafter_error"] == "prompt_refused: the drafter's side: no such words"
    assert engine._slots.free == [0, 1, 2]


def count_prompts(drafter: ModelDrafter, refused: Container[str] = ()) -> list[str]:
    """Makes the drafter refuse the prompts of some samples."""
    made: list[str] = []
    make = drafter.prefixes

    def counted(request: Request, prefill_output: PrefillOutput) -> list[Prefix]:
        if request.sample_id in refused:
            raise PromptError("no such words")
        made.append(request.sample_id)
        return make(request, prefill_output)

    drafter.prefixes = counted  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("kind", "family", "tree", "pattern"),
    [
        ("eagle", "llama", "dynamic", MIXED),
        ("eagle", "llama", "branching", [0, 2, 2]),
        ("vispec", "llava", "branching", [0, 2, 2]),
        ("medusa", "llama", "branching", MIXED),
    ],
)
def test_a_heads_drafts_are_those_of_a_slow_head_after_any_pattern(
    kind: str, family: str, tree: str, pattern: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    late_engine(monkeypatch, pattern, until_drafted=False)
    heads.check_drafts(kind, family, tree)


@pytest.mark.parametrize(
    ("kind", "widest"), [("eagle", 2), ("eagle", 4), ("eagle", missed.WIDEST), ("vispec", 2), ("vispec", missed.WIDEST)]
)
def test_the_heads_kv_cache_equals_a_fresh_encoding_after_every_draft(
    kind: str, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missed, "WIDEST", widest)
    monkeypatch.setattr(missed_module, "WIDEST", widest)
    late_engine(monkeypatch, MIXED)
    heads.check_memory("llava", "dynamic", kind=kind)


def test_lookup_tracks_the_text_through_steps_without_drafts() -> None:
    drafter = LookupDrafter()
    engine = Engine(toys.target("llama"), unsettled(Method(drafter, Chain(4), Exact()), pattern=MIXED), 3, 128)
    for request in checks.requests("llama", 6):
        engine.submit(request)
    num_compared = 0
    while engine.has_work:
        engine.step()
        for slot, progress in enumerate(engine._slots.progress):
            if progress is not None:
                prompt = toys.front_end("llama").encode(progress.request.prompt, ())["input_ids"][0].tolist()
                length = int(drafter._length[slot])
                assert drafter._text[slot, :length].tolist() == [*prompt, *progress.token_ids]
                num_compared += 1
    assert num_compared > 10


def test_the_engine_counts_missed_tokens_including_prompts() -> None:
    engine, _ = unsettled_engine(LONG)
    checks.run(engine, long_requests())
    controller = engine.method.controller
    assert isinstance(controller, Erratic)
    output = [outcome.num_missed for outcome in controller.outcomes]
    assert all(missed == 0 for missed, outcome in zip(output, controller.outcomes, strict=True) if not outcome.levels)
    assert max(output) > 11 * 2, "eleven steps of several rows were missed"
    lengths = [len(toys.front_end("llama").encode(request.prompt, ())["input_ids"][0]) for request in long_requests()]
    assert sum(outcome.prefill.num_tokens for outcome in controller.outcomes) == sum(lengths)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, [(0, 2)]),
        (2, [(0, 2)]),
        (3, [(0, 4)]),
        (5, [(0, 8)]),
        (128, [(0, 128)]),
        (129, [(0, 128), (128, 2)]),
        (256, [(0, 128), (128, 128)]),
        (300, [(0, 128), (128, 128), (256, 64)]),
    ],
)
def test_catching_up_is_one_forward_up_to_128_tokens(tokens: int, expected: list[tuple[int, int]]) -> None:
    assert catch_up_widths(tokens) == expected
