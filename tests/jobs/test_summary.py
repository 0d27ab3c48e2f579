"""The closing summary is counted from the written files, and its numbers can be computed by hand."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pyarrow as pa
import pytest

from actors.auto.trial import CHOSEN, SLOWER
from actors.results import CandidateResult, TrialResult, result_values, telemetry_values
from actors.serving.engine_thread import Waits
from decoding.errors import failed
from decoding.types import Completion, Telemetry
from files.plurals import counted
from jobs.terminal.clock import command_start
from jobs.terminal.refusals import RED, RESET, print_failure
from pipeline.output.files import Format
from pipeline.output.publishing import Publisher
from pipeline.reports import summary, trials
from pipeline.rows.schemas import TELEMETRY, result_schema
from pipeline.storage.output_dir import OutputDir


def result_table(completions: list[Completion], errors: list[str]) -> pa.Table:
    """Rows of the result schema from completions and codes of rows that never ran."""
    values = [result_values(completion) for completion in (*completions, *(failed("", code, "why") for code in errors))]
    columns = {}
    for field in result_schema():
        if field.name == "telemetry":
            columns[field.name] = [telemetry_values(row["telemetry"], TELEMETRY) for row in values]
        elif field.name in values[0]:
            columns[field.name] = [row[field.name] for row in values]
        else:
            filler = "x" if field.type == pa.string() else 1
            columns[field.name] = [filler] * len(values)
    return pa.table(columns, schema=result_schema())


def completion_of(histogram: tuple[int, ...], num_tokens: int, reason: str = "stop") -> Completion:
    accepted = sum(kept * count for kept, count in enumerate(histogram))
    telemetry = Telemetry(
        num_spec_steps=sum(histogram),
        num_draft_tokens=(len(histogram) - 1) * sum(histogram),
        num_accepted_draft_tokens=accepted,
        acceptance_histogram=histogram,
        prefill_ms=100.0,
        draft_ms=200.0,
        verify_ms=700.0,
    )
    return Completion("a", tuple(range(num_tokens)), "text", finish_reason=reason, telemetry=telemetry)


def write(directory: OutputDir, number: int, table: pa.Table) -> None:
    publisher = Publisher(directory, Format(result_schema()), 1, "f00d")
    for file in publisher.spool(number, [table]):
        publisher.publish(file.folder, number, [file])


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    directory = OutputDir(str(tmp_path))
    first = [completion_of((1, 2, 1), 8), completion_of((0, 0, 4), 13, "length")]
    write(directory, 0, result_table(first, ["not_an_image", "broken_image"]))
    write(directory, 1, result_table([completion_of((2,), 3)], ["not_an_image"]))
    return directory


def test_totals_follow_from_the_rows(output: OutputDir) -> None:
    totals = summary.count(output, summary.Summary("job", "chain", "lossless", 2.0))
    assert totals.num_samples == 6
    assert totals.by_status == {"error": 3, "success": 2, "truncated": 1}
    assert totals.errors_by_type == {"not_an_image": 2, "broken_image": 1}
    assert totals.samples_per_s == 1.5
    assert totals.num_generated_tokens == 24
    assert totals.tokens_per_s == 12.0
    assert totals.engine_s == pytest.approx(3.0)
    assert totals.tokens_per_engine_s == pytest.approx(8.0)
    assert (totals.prefill_ms, totals.draft_ms, totals.verify_ms) == (300.0, 600.0, 2100.0)


def test_the_acceptance_length_counts_the_bonus_token_over_all_steps(output: OutputDir) -> None:
    totals = summary.count(output, summary.Summary("job", "chain", "lossless", 2.0))
    assert totals.num_steps == 10
    assert totals.num_accepted_draft_tokens == 12
    assert totals.mean_acceptance_length == pytest.approx(2.2)
    assert totals.acceptance_histogram == [3, 2, 5]
    assert totals.acceptance_by_position == [0.7, 0.5]


def test_the_text_names_every_number_and_the_convention(output: OutputDir) -> None:
    text = summary.show(summary.count(output, summary.Summary("job", "chain", "lossless", 2.0)))
    assert "rows               6 (3 error, 2 success, 1 truncated)" in text
    assert "errors             2 not_an_image, 1 broken_image" in text
    assert "engine time        prefill 10 %, draft 20 %, verify 70 %" in text
    assert "  position 2       ███████████████··············· 0.50" in text
    assert "the bonus token included" in text


def test_samples_are_counted_by_their_first_rows(tmp_path: Path) -> None:
    directory = OutputDir(str(tmp_path))
    positions = [  # (clip_index, prompt_index)
        *[(index, None) for index in range(3)],  # a video in three clips
        *[(index, prompt) for index in range(2) for prompt in range(2)],  # two clips, each asked twice
        (None, None),  # an image
        (None, 0),
        (None, 1),  # an image asked twice
    ]
    table = result_table([completion_of((1,), 2)] * len(positions), [])
    for number, name in enumerate(summary.PLACES):
        column = table.schema.get_field_index(name)
        table = table.set_column(
            column, table.schema.field(column), pa.array([row[number] for row in positions], pa.int32())
        )
    write(directory, 0, table)
    whole = summary.count(directory, summary.Summary("job", "chain", "lossless", 1.0))
    assert (whole.num_samples, whole.num_inputs) == (10, 4)


def test_wait_times_are_reported_as_shares(output: OutputDir) -> None:
    totals = summary.count(
        output, summary.Summary("job", "chain", "lossless", 2.0, Waits(idle_s=1.0, queued_s=3.0, total_s=4.0))
    )
    assert "waiting            actors for input 25 %, input for actors 75 %" in summary.show(totals)
    result = totals.to_json()
    assert (result["actors_waited_share"], result["input_waited_share"]) == (0.25, 0.75)
    assert summary.combine([totals, totals]).waits == Waits(2.0, 6.0, 8.0)


def test_combining_two_jobs_equals_counting_both_at_once(output: OutputDir) -> None:
    summary_of_job = summary.count(output, summary.Summary("job", "chain", "lossless", 2.0))
    both = summary.combine([summary_of_job, summary_of_job])
    assert both.num_samples == 12
    assert both.wall_s == 4.0
    assert both.samples_per_s == summary_of_job.samples_per_s
    assert both.mean_acceptance_length == summary_of_job.mean_acceptance_length
    assert both.errors_by_type == {"not_an_image": 4, "broken_image": 2}
    assert summary_of_job.num_samples == 6


def test_rates_are_of_the_rows_of_the_last_attempt_and_totals_of_all(tmp_path: Path) -> None:
    directory = OutputDir(str(tmp_path))
    table = result_table([completion_of((2,), 3)] * 4, ["not_an_image"])
    column = table.schema.get_field_index("attempt")
    attempts = pa.array([1, 1, 1, 2, 2], pa.int32())
    write(directory, 0, table.set_column(column, table.schema.field(column), attempts))
    directory.take_attempt({}, 1)
    directory.take_attempt({}, 2)
    totals = summary.count(directory, summary.Summary("job", "chain", "lossless", 2.0))
    assert (totals.num_samples, totals.num_made, totals.num_tokens_made) == (5, 1, 3)
    assert (totals.samples_per_s, totals.tokens_per_s) == (0.5, 1.5)
    assert "attempt            2, which made 1 row" in summary.show(totals)


def test_trials_are_shown_with_the_interval_and_outcome_of_each_method(tmp_path: Path) -> None:
    directory = OutputDir(str(tmp_path))
    table = result_table([completion_of((2,), 3)] * 6, ["not_an_image"])
    method = pa.array(["plain", "chain", "chain", "chain", "plain", "chain", "auto"])
    write(directory, 0, table.set_column(table.schema.get_field_index("method"), table.schema.field("method"), method))
    standings = (
        CandidateResult("chain", 0.0123, 0.0118, 0.0129, 3.214, 64, CHOSEN),
        CandidateResult("plain", 0.02, None, None, 1.0, 32, SLOWER),
        CandidateResult("lookup", None, None, None, 1.0, 0, "failed to draft for 2 rows"),
    )
    choice = TrialResult("chain", "first rows", 96, 2, 40.0, standings)
    totals = summary.count(directory, summary.Summary("job", "auto", "lossless", 2.0, Waits(choices=(choice,) * 5)))
    assert totals.by_method == {"chain": 4, "plain": 2}
    lines = totals.lines()
    assert ("decoded by", "4 chain, 2 plain") in lines
    assert ("kept", "in 5 trials: 5 chain") in lines
    assert ("  tried on", "96 rows in 2 rounds, first rows") in lines
    result = "12.3 ms per sample (11.8 to 12.9), acceptance length 3.21, 64 rows: chosen"
    assert [value for label, value in lines if label == "    chain"] == [result] * trials.MAX_TRIALS_SHOWN
    assert ("    plain", "20 ms per sample, acceptance length 1.00, 32 rows: slower") in lines
    assert ("    lookup", "failed to draft for 2 rows") in lines
    assert ("  and more", "2 further trials are in _job/summary.json") in lines
    kept = totals.to_json()["waits"]["choices"][0]
    assert (kept["method"], kept["standings"][0]["low_s"]) == ("chain", 0.0118)
    early = summary.count(directory, summary.Summary("job", "auto", "lossless", 2.0))
    assert ("kept", "none yet: no engine had rows enough to choose") in early.lines()
    assert summary.combine([totals, early]).by_method == {"chain": 8, "plain": 4}


def test_truncated_rows_name_the_option_to_raise(output: OutputDir) -> None:
    totals = summary.count(output, summary.Summary("job", "chain", "lossless", 2.0))
    assert dict(totals.lines())["truncated"] == "16.7 % of all rows reached sampling.max_new_tokens; raise it"
    totals.by_status = {"success": 6}
    assert "truncated" not in dict(totals.lines())


def test_the_wall_time_of_a_command_is_that_of_its_user() -> None:
    totals = summary.Summary("job", "chain", "lossless", 2.0)
    assert dict(totals.lines())["wall time"] == "2.0 s"
    totals.command_s = 7.5
    assert dict(totals.lines())["wall time"] == "7.5 s, of which 2.0 s from the first task to the last file"
    assert "command_s" not in totals.to_json()


def test_a_command_begins_with_its_process() -> None:
    now = time.monotonic()
    assert command_start(is_command_line=False) >= now
    assert command_start(is_command_line=True) <= now


def test_failures_are_red_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, text in ((Terminal(), f"{RED}the job failed{RESET}\n"), (io.StringIO(), "the job failed\n")):
        monkeypatch.setattr("sys.stderr", stream)
        print_failure("the job failed")
        assert stream.getvalue() == text
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("NO_COLOR", "1")
    print_failure("the job failed")
    assert stream.getvalue() == "the job failed\n"


@pytest.mark.parametrize(("number", "text"), [(0, "0 files"), (1, "1 file"), (2000, "2,000 files")])
def test_counts_have_the_right_number(number: int, text: str) -> None:
    assert counted(number, "file") == text
