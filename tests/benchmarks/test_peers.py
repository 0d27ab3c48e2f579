"""Peers get a speed only for equal outputs: their comparison, the order of their runs, and their tables."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.markdown import equality
from benchmarks.harness.process import Outcome
from benchmarks.harness.verdict import Verdict, first_difference, judge, make_row, turns
from benchmarks.peers import __main__ as peers
from benchmarks.peers import rounds as peer_launches
from benchmarks.peers.rounds import CONTENDERS, Cell, Launched, Timed, measure_batch, run_launch
from benchmarks.tables.engine import best_rows, ratio
from benchmarks.tables.parts import PARTS

REFERENCE = [
    {"tokens": [5, 6, 2], "top": [9.0, 9.0, 9.0], "gap": [3.0, 0.2, 3.0]},
    {"tokens": [7, 8, 9, 9], "top": [8.0, 20.0, 8.0, 8.0], "gap": [3.0, 0.4, 3.0, 3.0]},
]
TOKENS = [row["tokens"] for row in REFERENCE]


# --- outputs -------------------------------------------------------------------------------------------------------


def test_another_choice_is_close_where_the_two_best_were_and_different_elsewhere() -> None:
    # 4 units in the last place of bfloat16 are 4 / 16 at 9, and 4 / 8 at 20.
    close = judge([[5, 9, 9, 9], [7, 1]], REFERENCE, "bfloat16")
    assert (close.num_equal, close.num_close, close.num_different) == (0, 2, 0)
    assert close.worst == pytest.approx(0.2 / 0.25)
    assert judge([[5, 9, 9], TOKENS[1]], REFERENCE, "float32") == Verdict(2, 1, 0, 1, 0.2 / (4 * 2.0**-20))
    assert judge([TOKENS[0], [7, 8, 1, 1]], REFERENCE, "bfloat16").num_different == 1


@pytest.mark.parametrize("tokens", [[5, 6], [5, 6, 2, 2], []], ids=["too short", "beyond the end", "empty"])
def test_an_output_that_ends_elsewhere_is_different_however_near_the_choices_were(tokens: list[int]) -> None:
    near = [{"tokens": [5, 6, 2], "top": [9.0] * 3, "gap": [0.0] * 3}]
    assert judge([tokens], near, "bfloat16") == Verdict(1, 0, 0, 1, 0.0)


def test_a_missing_output_is_not_compared() -> None:
    with pytest.raises(ValueError, match="1 outputs for 2 sequences"):
        judge(TOKENS[:1], REFERENCE, "bfloat16")


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_sequences_are_equal_up_to_their_first_difference(first: list[int], other: list[int]) -> None:
    position = first_difference(first, other)
    if position is None:
        assert first == other
    else:
        assert first[:position] == other[:position]
        assert first[position : position + 1] != other[position : position + 1]


# --- rows ----------------------------------------------------------------------------------------------------------


def test_a_row_holds_the_median_and_the_range_of_its_passes() -> None:
    row = make_row([Outcome(s, TOKENS, 4, 6) for s in (2.0, 1.0, 4.0)], REFERENCE, "bfloat16", 7)
    assert row["tokens_per_s"] == {"median": 3.5, "low": 1.75, "high": 7.0}
    assert row["samples_per_s"] == {"median": 1.0, "low": 0.5, "high": 2.0}
    assert row["acceptance_length"] == 2.5
    assert row["verdict"]["num_sequences"] == 6
    assert (row["peak_bytes"], row["withheld"]) == (7, "")


def test_one_pass_with_different_outputs_removes_the_speed_of_the_row() -> None:
    wrong = Outcome(0.1, [[5, 6, 2], [1]])
    row = make_row([Outcome(2.0, TOKENS), wrong, Outcome(2.0, TOKENS)], REFERENCE, "bfloat16", 0)
    assert row["tokens_per_s"] is None
    assert row["samples_per_s"] is None
    assert row["withheld"] == "1 of 6 outputs differ from the target's own"


def test_outputs_within_rounding_keep_their_speed_and_are_marked() -> None:
    row = make_row([Outcome(1.0, [[5, 9, 9], TOKENS[1]])], REFERENCE, "bfloat16", 0)
    assert row["tokens_per_s"]["median"] == 7.0
    assert equality(row["verdict"]) == "50.0 %, the others within rounding"


# --- the run -------------------------------------------------------------------------------------------------------


class FakePeer:
    """Answers from a list, and notes whether it runs."""

    def __init__(self, name: str, running: list[str], tokens: list[list[int]]) -> None:
        self.name, self._running, self._tokens = name, running, tokens
        self.asked: list[tuple[str, int, int]] = []
        self._peaks = iter(range(1, 100))

    def resume(self) -> None:
        self._running.append(self.name)

    def pause(self) -> None:
        self._running.remove(self.name)

    def forget_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return next(self._peaks)

    def ask(self, verb: str, batch: int, num_requests: int) -> Outcome:
        assert self._running == [self.name]
        self.asked.append((verb, batch, num_requests))
        return Outcome(2.0, self._tokens[: num_requests if verb == "run" else 1], 0, 0)


def test_peers_run_one_at_a_time_after_all_are_warm(capsys: pytest.CaptureFixture[str]) -> None:
    running: list[str] = []
    there = {name: FakePeer(name, running, TOKENS) for name in "abc"}
    timed: dict[str, Timed] = {}
    measure_batch(there, 4, REFERENCE, "bfloat16", list(turns(list(there), 2)), timed)  # type: ignore[arg-type]
    for name, peer in there.items():
        assert peer.asked == [("warm", 4, 2), ("run", 4, 2), ("run", 4, 2)]
        row = timed[name].row(REFERENCE, "bfloat16")
        assert row["tokens_per_s"]["median"] == 3.5
        assert row["peak_bytes"] == 2
    printed = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in printed] == ["a", "b", "c", "a", "b", "c", "b", "c", "a"]


def test_a_peer_with_other_outputs_gets_no_speed_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    running: list[str] = []
    wrong = FakePeer("wrong", running, [[1], [2]])
    timed: dict[str, Timed] = {}
    measure_batch({"wrong": wrong}, 1, REFERENCE, "bfloat16", [["wrong"]], timed)  # type: ignore[dict-item]
    assert timed["wrong"].row(REFERENCE, "bfloat16")["tokens_per_s"] is None
    assert "1 outputs, equal 0.0 %, **1 beyond rounding**" in capsys.readouterr().err


class Process:
    """A fake peer process that records its life cycle."""

    noted: ClassVar[list[str]] = []

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.versions = name, {"python": name}

    def __enter__(self) -> Process:
        self.noted.append(f"open {self.name}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None: ...

    def pause(self) -> None: ...

    def close(self) -> None:
        self.noted.append(f"close {self.name}")


@pytest.mark.parametrize(
    ("batches", "events"),
    [
        ([1, 8], ["batch 1: single, other", "close single", "batch 8: other"]),
        ([8, 1, 32], ["batch 8: other", "batch 1: single, other", "close single", "batch 32: other"]),
        ([8], ["close single", "batch 8: other"]),
    ],
)
def test_a_launch_starts_every_peer_once_and_ends_those_of_one_row_when_they_are_through(
    batches: list[int], events: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peer_launches, "Peer", Process)
    noted: list[str] = []
    monkeypatch.setattr(Process, "noted", noted)
    single = next(contender for contender in CONTENDERS if contender.single)._replace(name="single")
    other = next(contender for contender in CONTENDERS if not contender.single)._replace(name="other")
    launched = [Launched(contender, "python", {}) for contender in (single, other)]
    for cell, there in run_launch(launched, tmp_path / "work.json", [Cell(batch, 8, 1) for batch in batches]):
        noted.append(f"batch {cell.batch}: {', '.join(there)}")
    # What was ended early is ended again with the rest, which does nothing.
    assert list(dict.fromkeys(noted)) == ["open single", "open other", *events, "close other"]


@pytest.mark.parametrize(
    "arguments", [["--requests-per-slot", "8", "2", "0"], ["--launches", "0"], ["--repeats", "1", "1"]]
)
def test_contradictory_command_lines_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parse(arguments)


# --- the tables ----------------------------------------------------------------------------------------------------


def row(name: str, variant: str, batch: int, seconds: list[float], num_different: int = 0) -> dict[str, Any]:
    outputs = [TOKENS[0], [1, 1] if num_different else TOKENS[1]]
    made = make_row([Outcome(value, outputs, 2, 4) for value in seconds], REFERENCE, "bfloat16", 3 << 30)
    return {"batch": batch, "name": name, "row": name, "variant": variant, **made}


RESULTS: dict[str, Any] = {
    "target": "text_target",
    "drafter": "text_drafter",
    "target_shape": "0.3B",
    "drafter_shape": "draft-0.05",
    "dtype": "bfloat16",
    "threads": 2,
    "gamma": 5,
    "max_new_tokens": 64,
    "ignore_eos": False,
    "launches": 2,
    "tolerance_ulps": 4,
    "machine": "a machine",
    "versions": {"engine_plain": {"torch": "2.13.0"}, "vllm_plain": {"torch": "2.13.0", "vllm": "0.32.0"}},
    "rows": [
        row("draftfleet", "", 1, [1.0, 2.0]),
        row("transformers", "eager", 1, [2.0, 3.0]),
        row("transformers", "compiled", 1, [1.5, 2.5]),
        row("vLLM", "", 1, [0.5, 1.0]),
        row("draftfleet, drafter", "", 8, [1.0, 1.0]),
        row("vLLM, drafter", "", 8, [2.5, 2.25]),
        row("vLLM, n-grams", "", 8, [1.0, 1.0], num_different=1),
    ],
}


def test_the_faster_variant_represents_its_engine() -> None:
    best = {(row["batch"], row["row"]): row["variant"] for row in best_rows(RESULTS)}
    assert best[1, "transformers"] == "compiled"
    changed = copy.deepcopy(RESULTS)
    changed["rows"][2] = row("transformers", "compiled", 1, [0.1, 0.1], num_different=1)
    best = {(row["batch"], row["row"]): row["variant"] for row in best_rows(changed)}
    assert best[1, "transformers"] == "eager"


def test_the_table_shows_no_speed_where_outputs_differ() -> None:
    lines = {line.split(" | ")[1]: line for line in PARTS["peers"].render(RESULTS).splitlines()[2:]}
    assert lines["vLLM, n-grams"].split(" | ")[2:4] == ["withheld", "withheld"]
    assert "50.0 %, **2 beyond rounding**" in lines["vLLM, n-grams"]
    assert lines["draftfleet"] == (
        "| 1 | draftfleet | 5.2 (3.5–7.0) | 1.50 (1.00–2.00) | 3.00 | all | 3.0 GiB |"  # 7 tokens in 1 s and in 2 s
    )


def test_speeds_are_compared_round_by_round() -> None:
    first, second = RESULTS["rows"][0], RESULTS["rows"][2]
    ratio_of_passes = ratio(first, second)
    assert ratio_of_passes is not None
    assert ratio_of_passes == {"median": 1.375, "low": 1.25, "high": 1.5}
    assert ratio(first, RESULTS["rows"][6]) is None


def test_claims_follow_from_the_rows() -> None:
    lines = [line.split(" | ") for line in PARTS["peers_claims"].render(RESULTS).splitlines()[2:]]
    assert [(line[0], line[1], line[4]) for line in lines] == [
        ("| plain decoding, batch 1", "transformers", "yes |"),
        ("| plain decoding, batch 1", "vLLM", "**no** |"),
        ("| speculation, batch 8", "vLLM, drafter", "yes |"),
    ]
    assert math.isclose(float(lines[2][2].split()[0]), 2.38, abs_tol=0.01)


def test_a_claim_against_a_rival_without_a_speed_is_not_known() -> None:
    changed = copy.deepcopy(RESULTS)
    changed["rows"][5] = row("vLLM, drafter", "", 8, [2.5, 2.25], num_different=1)
    assert "| not known |" in PARTS["peers_claims"].render(changed).splitlines()[-1]
