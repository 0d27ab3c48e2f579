"""Checks of texts: which codes a text gets, what is refused, and further attempts of rows that fail them."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.checks import CODES, CheckError, Checks
from actors.generate import Generate
from actors.results import Stamp
from configs.load import ConfigError, validate
from configs.output import ChecksConfig
from configs.schema import CaptionJobConfig
from decoding.types import Completion, Request, RequestError
from pipeline.rows.columns import CHECKS
from pipeline.rows.schemas import job_schema
from tests.actors.fakes import FakeEngine, FakePair, complete, decoded_table, fake_job
from tests.actors.test_generate import run


def failed(text: str, finish_reason: str = "stop", **options: Any) -> tuple[str, ...]:
    return Checks(validate(ChecksConfig, options, "a test")).failed(
        Completion("a", text=text, finish_reason=finish_reason)
    )


@pytest.mark.parametrize(
    ("text", "options", "codes"),
    [
        ("A cat.", {}, ()),
        (" \n", {}, ("empty",)),
        ("", {"empty": False}, ()),
        ("", {"min_words": 1}, ("empty", "too_short")),
        ("A cat.", {"min_words": 3}, ("too_short",)),
        ("A black cat.", {"min_words": 3}, ()),
        ("  abcd  ", {"min_characters": 5}, ("too_short",)),
        ("abcde", {"min_characters": 5}, ()),
        ("Eine Straße, 1940 – «süß»!", {"scripts": ["Latin"]}, ()),
        ("Кошка", {"scripts": ["Latin"]}, ("wrong_script",)),
        ("A cat (кот)", {"scripts": ["Latin"], "min_script_share": 0.5}, ()),
        ("A cat (кот)", {"scripts": ["Latin"], "min_script_share": 0.6}, ("wrong_script",)),
        ("A cat (кот)", {"scripts": ["Latin", "Cyrillic"], "min_script_share": 1.0}, ()),
        ("猫がいます", {"scripts": ["Han", "Hiragana", "Katakana"]}, ()),
        ("猫がいます", {"scripts": ["Han"]}, ("wrong_script",)),
        ("12:30, 50 %", {"scripts": ["Arabic"]}, ()),
    ],
)
def test_a_text_gets_the_codes_of_the_checks_it_fails(text: str, options: dict[str, Any], codes: tuple[str]) -> None:
    assert failed(text, **options) == codes


def test_a_loop_fails_where_it_is_checked() -> None:
    assert failed("a a a", "looped") == ("looped",)
    assert failed("a a a", "looped", looped=False) == ()
    assert failed("a a a", "length") == ()


def test_a_row_with_an_error_fails_no_check() -> None:
    completion = Completion("a", finish_reason="error", error=RequestError("row_timeout", "slow"))
    assert Checks(ChecksConfig()).failed(completion) == ()


def test_the_column_lists_every_code() -> None:
    [(_, _, description)] = CHECKS
    assert [code for code in CODES if f"`{code}`" not in description] == []


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "check_of_a_user.py").write_text(
        "def no_watermark(text):\n    return 'stock' not in text\n"
        "def broken(text):\n    return 1 / len('')\n"
        "def number(text):\n    return 0.5\n"
        "constant = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "check_of_a_user", raising=False)
    return "check_of_a_user"


def test_a_function_of_the_user_decides_on_the_text(module: str) -> None:
    assert failed("a stock photo", python=f"{module}:no_watermark") == ("python",)
    assert failed("a photo", python=f"{module}:no_watermark") == ()


@pytest.mark.parametrize(
    ("name", "message"), [("broken", "raised ZeroDivisionError"), ("number", "returned 0.5, and a check returns True")]
)
def test_a_function_without_an_answer_ends_the_job_with_its_name(module: str, name: str, message: str) -> None:
    with pytest.raises(CheckError, match=rf"the check {module}:{name} {message}"):
        failed("a", python=f"{module}:{name}")


def test_what_cannot_be_checked_is_refused(module: str) -> None:
    for options, message in (
        ({"scripts": ["Latinish"]}, r"checks\.scripts: 'Latinish' is no script of Unicode; names are such as Latin"),
        ({"python": f"{module}:absent"}, r"checks\.python: check_of_a_user:absent: .*absent"),
        ({"python": f"{module}:constant"}, r"checks\.python: check_of_a_user:constant is no function but int"),
        ({"python": "nowhere.py"}, r"checks\.python|python: String should match pattern"),
        ({"scripts": ["\\d"]}, r"scripts\.0: String should match pattern"),
    ):
        with pytest.raises(ConfigError, match=message):
            failed("a", **options)


# --- retries -------------------------------------------------------------------------------------------------------


class Drawing(FakeEngine):
    """Draws the text of a request from its seed, id, attempt and sampling; some texts are empty."""

    def finish(self, request: Request) -> Completion:
        return drawn(request)


def drawn(request: Request) -> Completion:
    completion = complete(request)
    if completion.error is not None:
        return completion
    sampling = request.sampling
    key = f"{request.seed}/{request.sample_id}/{request.attempt}/{sampling.temperature}/{sampling.top_k}"
    words = random.Random(key).choices(["", "", "x", "cat"], k=2)
    if "LATE" in request.prompt and request.attempt == 1:
        return replace(completion, text="", error=RequestError("row_timeout", "late"))
    return replace(completion, text=" ".join(words).strip(), attempt=request.attempt)


class DrawingPair(FakePair):
    def engine(self, slots: int) -> FakeEngine:
        self.engines.append(Drawing(slots, self.gate))
        return self.engines[-1]


def retried(**retry: Any) -> CaptionJobConfig:
    return fake_job(checks={"min_characters": 5}, retry={"temperature": 0.7, "top_k": 5, "max_attempts": 3, **retry})


def captions(job: CaptionJobConfig, *tables: pa.Table) -> list[dict[str, Any]]:
    pair = DrawingPair()
    actor = Generate(job, job_schema(job), Stamp("job-1", 1, "f00d"), load=lambda config, num_threads: pair)
    return [row for table in run(actor, *tables) for row in table.to_pylist()]


def by_hand(sample_id: str, max_attempts: int) -> tuple[int, str, list[str]]:
    """The rule, written a second time: the first attempt that passes, else the one that fails least, the first such."""
    attempts = []
    for attempt in range(max_attempts + 1):
        temperature, top_k = (0.7, 5) if attempt else (0.0, 0)
        words = random.Random(f"0/{sample_id}/{attempt}/{temperature}/{top_k}").choices(["", "", "x", "cat"], k=2)
        text = " ".join(words).strip()
        codes = [*(["empty"] if not text else []), *(["too_short"] if len(text) < 5 else [])]
        attempts.append((attempt, text, codes))
        if not codes:
            break
    return min(attempts, key=lambda one: len(one[2]))


def test_rows_that_fail_are_tried_again_with_other_sampling_and_the_best_attempt_is_kept() -> None:
    rows = captions(retried(), decoded_table([{"id": f"s{i}", "text": "ask"} for i in range(60)]))
    found = {row["sample_id"]: (row["retry_index"], row["generated_text"], row["failed_checks"]) for row in rows}
    assert found == {f"s{i}": by_hand(f"s{i}", 3) for i in range(60)}
    assert {index for index, *_ in found.values()} == {0, 1, 2, 3}
    assert any(codes == ["too_short"] and index for index, _, codes in found.values()), "none was kept as the best"


def test_attempts_do_not_depend_on_batches() -> None:
    rows = [{"id": f"s{i}", "text": "ask", "row_index": i} for i in range(24)]
    whole = captions(retried(), decoded_table(rows))
    assert captions(retried(), *(decoded_table(rows[i : i + 5]) for i in range(0, 24, 5))) == whole


def test_an_attempt_that_fails_by_an_error_makes_an_error_row() -> None:
    names = [f"s{i}" for i in range(20) if by_hand(f"s{i}", 0)[2]]
    rows = captions(retried(), decoded_table([{"id": name, "text": "LATE"} for name in names]))
    assert {(row["status"], row["error_type"]) for row in rows} == {("error", "row_timeout")}
    assert {tuple(row["failed_checks"]) for row in rows} == {()}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"retry": {"temperature": 0.7}}, "retry: rows that fail checks .*, and there is no section checks"),
        ({"checks": {}, "retry": {}}, r"retry\.temperature: give a temperature"),
        ({"checks": {}, "retry": {"top_k": 5}, "sampling": {"from_checkpoint": True}}, r"retry\.temperature: give"),
        ({"checks": {}, "retry": {"temperature": 0.0}}, r"retry\.temperature: Input should be greater than 0"),
        ({"checks": {}, "retry": {"temperature": 0.7, "max_attempts": 0}}, r"retry\.max_attempts"),
    ],
)
def test_retries_without_a_reason_or_a_difference_are_refused(sections: dict[str, Any], message: str) -> None:
    data = fake_job().resolved() | sections
    with pytest.raises(ConfigError, match=message):
        validate(CaptionJobConfig, data, "a test")


def test_checks_and_retries_are_content_only_where_they_are_set() -> None:
    assert not {"checks", "retry"} & fake_job().content({}).keys()
    assert fake_job(checks={}).content({})["checks"]["empty"] is True
    assert retried().content({})["retry"] == {"temperature": 0.7, "top_k": 5, "max_attempts": 3}
