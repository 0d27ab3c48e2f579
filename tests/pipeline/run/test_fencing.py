"""A superseded attempt does not change files of the later one, wherever it was delayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import CaptionJobConfig
from pipeline.check.output import check_output
from pipeline.output.files import checksum_name, spool_name
from pipeline.output.publishing import Fenced, Publisher
from pipeline.output.writer import Writer
from pipeline.reports.summary import Summary
from pipeline.run.execution import write_provenance
from pipeline.run.finalize import finalize
from pipeline.run.job_plan import ResumeOptions
from pipeline.run.plan import Plan
from pipeline.run.resume import AttemptState, fingerprints_of, read_prior_state
from pipeline.storage.output_dir import OutputDir
from tests.pipeline.attempts import at_rest, end, job, make_rows, plan_of, rows_in, run, save, start, write_summary

pytestmark = pytest.mark.slow

NUM_ROWS = 30
RETRY = ResumeOptions(retry_errors=True)


def config_in(folder: Path) -> CaptionJobConfig:
    (folder / "in").mkdir(parents=True)
    (folder / "in/a.txt").write_text("".join(f"line {row}\n" for row in range(NUM_ROWS)))
    return job({"kind": "text", "path": str(folder / "in"), "span_max_rows": 8}, folder / "out")


def snapshot(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def fails_on(ending: str) -> Callable[[str], bool]:
    return lambda own: own.endswith(ending)


def ready_to_settle(config: CaptionJobConfig) -> tuple[Plan, AttemptState]:
    """Attempt 2 before its end, with something of each kind to do: superseded errors, late spool files, strange files,
    a checksum that lacks."""
    old_plan, old = start(plan_of(config))
    batches = make_rows(old_plan, 1, fails_on("7"))
    save(old_plan, old, batches)
    end(old_plan, old)
    plan, begun = start(plan_of(config, RETRY))
    save(plan, begun, make_rows(plan, 2, lambda own: own == "a.txt#17"))
    old.publisher.spool(90, batches)  # late: its rows are published, good ones and errors
    output = OutputDir(config.sink.path)
    output.write_bytes("data/part-000040.parquet", b"torn")
    output.write_bytes("data/notes.txt", b"mine")
    output.remove(checksum_name("data/part-000000.parquet"))
    return plan, begun


def take_over(config: CaptionJobConfig) -> None:
    """A whole later attempt."""
    run(config, RETRY, fails_on("a.txt#17"))


class Delay:
    """Runs something once, before or after the n-th look at whether an attempt is alone."""

    def __init__(self, attempt: int, index: int, act: Callable[[], Any], before: bool) -> None:
        self.attempt, self.place, self.act, self.before = attempt, index, act, before
        self.num_seen = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        true = Publisher.check_alone

        def check(publisher: Publisher) -> None:
            self.num_seen += publisher.attempt == self.attempt
            is_it = publisher.attempt == self.attempt and self.num_seen == self.place
            if is_it and self.before:
                self.act()
            true(publisher)
            if is_it and not self.before:
                self.act()

        patch.setattr(Publisher, "check_alone", check)


def num_checks(folder: Path, prepare: Callable[[CaptionJobConfig], Callable[[], Any]], attempt: int) -> int:
    """How often an undisturbed act looks."""
    act = prepare(config_in(folder))
    with pytest.MonkeyPatch.context() as patch:
        counted = Delay(attempt, 0, lambda: None, before=True)
        counted.install(patch)
        act()
    return counted.num_seen


def settling(config: CaptionJobConfig) -> Callable[[], Any]:
    plan, begun = ready_to_settle(config)
    fingerprints = fingerprints_of(plan.output)  # those that were known before the later attempt
    return lambda: finalize(plan, begun.publisher, fingerprints, begun.next_numbers)


def saving(config: CaptionJobConfig) -> Callable[[], Any]:
    # One task at a time: others that run beside a delayed one may still spool, into the attempt's own folder.
    plan, begun = start(plan_of(config))
    batches = make_rows(plan, 1)
    spooled = [file for number, batch in enumerate(batches[:5]) for file in begun.publisher.spool(90 + number, [batch])]

    def act() -> None:
        with Writer(begun.publisher, config.sink, spooled, begun.next_numbers, max_tasks=1) as writer:
            for batch in batches[5:]:
                writer.add([batch], batch.num_rows, batch.nbytes)

    return act


def saving_in_parallel(config: CaptionJobConfig) -> Callable[[], Any]:
    plan, begun = start(plan_of(config))
    return lambda: save(plan, begun, make_rows(plan, 1))


def beginning(config: CaptionJobConfig) -> Callable[[], Any]:
    old_plan, old = start(plan_of(config))
    batches = make_rows(old_plan, 1, fails_on("7"))
    save(old_plan, old, batches[:3])
    old.publisher.spool(70, batches[:4])
    OutputDir(config.sink.path).write_bytes("data/part-000040.parquet", b"torn")
    plan = plan_of(config)
    return lambda: start(plan)


def closing(config: CaptionJobConfig) -> Callable[[], Any]:
    plan, begun = start(plan_of(config, limit=NUM_ROWS))
    save(plan, begun, make_rows(plan, 1))

    def act() -> None:
        write_provenance(plan, begun.publisher)
        write_summary(plan, Summary(plan.identity.job_id, "none", "exact", 1.0), begun.publisher)

    return act


ACTS = {"finalize": (settling, 2), "save": (saving, 1), "begin": (beginning, 2), "close": (closing, 1)}
LATE_ACTS = ACTS | {"save": (saving_in_parallel, 1)}


@pytest.mark.parametrize("name", ACTS)
def test_a_superseded_attempt_delayed_anywhere_changes_no_file(tmp_path: Path, name: str) -> None:
    prepare, attempt = ACTS[name]
    least = {"finalize": 9, "save": 5, "begin": 3, "close": 5}[name]
    total = num_checks(tmp_path / "undisturbed", prepare, attempt)
    assert total >= least, "fewer looks than there are moves, deletes and overwrites"
    for index in range(1, total + 1):
        config = config_in(tmp_path / str(index))
        act = prepare(config)
        left: dict[str, bytes] = {}

        def overtake(config: CaptionJobConfig = config, left: dict[str, bytes] = left) -> None:
            take_over(config)
            left |= snapshot(Path(config.sink.path))

        with pytest.MonkeyPatch.context() as patch:
            delay = Delay(attempt, index, overtake, before=True)
            delay.install(patch)
            try:
                act()
            except Fenced:
                pass
            else:  # a writer that was fast took more rows at once, and looked less often than the undisturbed one
                assert name == "save", f"it went on although it was overtaken at look {index}"
                assert delay.num_seen < index
                continue
        assert snapshot(Path(config.sink.path)) == left, f"touched after look {index}"


@pytest.mark.parametrize("name", LATE_ACTS)
def test_an_operation_delayed_after_its_fence_check_loses_no_row(tmp_path: Path, name: str) -> None:
    prepare, attempt = LATE_ACTS[name]
    for index in range(1, num_checks(tmp_path / "undisturbed", prepare, attempt) + 1):
        config = config_in(tmp_path / str(index))
        act = prepare(config)
        with pytest.MonkeyPatch.context() as patch:
            late = Delay(attempt, index, lambda config=config: take_over(config), before=False)
            late.install(patch)
            try:
                act()
            except Fenced:
                pass
            else:
                assert index >= late.num_seen, "it went on although it was overtaken"
        if name == "save":  # what it spooled late is in its own folder, and is removed by the next look
            take_over(config)
        output = Path(config.sink.path)
        good, bad = at_rest(output)
        assert len(good) + len(bad) == NUM_ROWS, f"rows were lost at look {index}"
        result = check_output(OutputDir(config.sink.path))
        assert (result.problems, result.num_missing) == ([], 0), f"damaged at look {index}"


def test_a_finalize_delayed_past_a_later_attempt_changes_no_row(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    plan, begun = start(plan_of(config, limit=8))
    save(plan, begun, make_rows(plan, 1))
    fingerprints = fingerprints_of(plan.output)
    run(config)
    left = snapshot(tmp_path / "out")
    with pytest.raises(Fenced, match=r"attempt 2 of .* has taken over from attempt 1"):
        finalize(plan, begun.publisher, fingerprints, begun.next_numbers)
    assert snapshot(tmp_path / "out") == left
    assert len(at_rest(tmp_path / "out")[0]) == NUM_ROWS


def test_finalize_does_not_move_spool_files_of_a_running_later_attempt(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    plan, begun = start(plan_of(config, limit=8))
    save(plan, begun, make_rows(plan, 1))
    fingerprints = fingerprints_of(plan.output)
    later_plan, later = start(plan_of(config))
    batches = make_rows(later_plan, 2)
    later.publisher.spool(0, batches[:2])
    with pytest.raises(Fenced):
        finalize(plan, begun.publisher, fingerprints, begun.next_numbers)
    assert (tmp_path / "out" / spool_name(2, 0, 0, "data")).exists()
    save(later_plan, later, batches[2:])
    run(config)
    assert len(at_rest(tmp_path / "out")[0]) == NUM_ROWS


def test_an_error_spooled_late_by_a_superseded_attempt_loses_no_row(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    old_plan, old = start(plan_of(config))
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 2, fails_on("7")))
    old.publisher.spool(0, make_rows(old_plan, 1, fails_on("7")))
    end(plan, begun)
    good, bad = at_rest(tmp_path / "out")
    assert (len(good), bad) == (NUM_ROWS - 3, {"a.txt#7", "a.txt#17", "a.txt#27"})
    assert {row["attempt"] for row in rows_in(tmp_path / "out/errors").values()} == {2}


def test_rows_in_late_spool_files_only_do_not_count_as_done(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    old_plan, old = start(plan_of(config))
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 2)[:-1])  # the last batch was lost on the way
    old.publisher.spool(0, make_rows(old_plan, 1)[-1:])
    with pytest.raises(RuntimeError, match="samples are missing"):
        end(plan, begun)
    run(config)
    assert len(at_rest(tmp_path / "out")[0]) == NUM_ROWS


def test_a_superseded_attempt_cannot_publish_under_the_number_of_a_file_set_aside(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    old_plan, old = start(plan_of(config))
    batches = make_rows(old_plan, 1)
    OutputDir(config.sink.path).write_bytes("data/part-000000.parquet", b"torn")
    run(config)
    with pytest.raises(Fenced):
        old.publisher.publish_rows("data", 0, batches[0])
    assert len(at_rest(tmp_path / "out")[0]) == NUM_ROWS
    assert len([path for path in (tmp_path / "out/_job/aside").rglob("*") if path.is_file()]) == 1


def test_an_emptied_file_whose_checksum_is_the_former_one_is_noted_again(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run(config, fails=fails_on("7"))
    plan, begun = start(plan_of(config, RETRY))
    save(plan, begun, make_rows(plan, 2))
    output = OutputDir(config.sink.path)
    former = output.read_bytes(checksum_name("errors/part-000000.parquet"))
    end(plan, begun)
    output.write_bytes(checksum_name("errors/part-000000.parquet"), former)  # as if killed before it was noted
    assert any("part-000000" in line for line in check_output(output).problems)
    (tmp_path / "in/b.txt").write_text("one more\n")
    run(config)
    assert check_output(output).problems == []


def test_a_superseded_attempt_rewrites_nothing(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 1))
    take_over(config)
    left = snapshot(tmp_path / "out")
    with pytest.raises(Fenced):
        begun.publisher.rewrite("data/part-000000.parquet", plan.schema.empty_table())
    assert snapshot(tmp_path / "out") == left


def test_the_audit_reads_the_newest_attempts_configuration(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run(config)
    output = OutputDir(config.sink.path)
    output.write_bytes("_job/config.yaml", b"sampling: {num_images_per_prompt: 7}")  # a late copy of another attempt's
    assert check_output(output).num_missing == 0
    assert read_prior_state(plan_of(config), plan_of(config).prior.gone).datasource.num_spans == 0
