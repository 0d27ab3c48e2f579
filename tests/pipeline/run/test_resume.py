"""Resuming an output: only missing rows are made, for any kind of source and any end of the last attempt."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from configs.load import ConfigError
from pipeline.output.publishing import Fenced
from pipeline.resources.resolve import Resources
from pipeline.run.execution import write_provenance
from pipeline.run.job_plan import ResumeOptions
from pipeline.run.resume import is_complete, resume_lines
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir
from tests.pipeline.attempts import at_rest, end, job, make_rows, plan_of, rows_in, run, save, start
from tests.pipeline.formats.shards import encode, tar_bytes, write_parquet

RED = encode("red")


def images(folder: Path, count: int = 12) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:02}.png").write_bytes(RED)
    return {"kind": "images", "path": str(folder), "span_max_rows": 5}


def parquet(folder: Path, count: int = 23) -> dict[str, Any]:
    for file in range(2):
        columns = {"id": [f"{file}-{row}" for row in range(count)], "image": [RED] * count}
        write_parquet(folder / f"{file}.parquet", columns, row_group_size=7)
    return {"kind": "parquet", "path": str(folder), "columns": {"image": "image"}, "span_max_rows": 5}


def tars(folder: Path, count: int = 9) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(3):
        (folder / f"{file}.tar").write_bytes(tar_bytes([(f"{row:03}.png", RED) for row in range(count)]))
    return {"kind": "webdataset", "path": str(folder)}


def lines(folder: Path, count: int = 30) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text("".join(f"line {row}\n" for row in range(count)))
    return {"kind": "text", "path": str(folder), "span_max_rows": 8}


def ids_spooled(output: Path) -> set[str]:
    return {own for path in output.glob("_job/spool/*/*") for own in pq.read_table(path)["sample_id"].to_pylist()}


SOURCES = {"images": images, "parquet": parquet, "tars": tars, "lines": lines}


@pytest.mark.slow_cases("1-", "3-images", "3-lines", "3-tars")
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_a_second_run_decodes_only_missing_rows(tmp_path: Path, kind: str, num_batches: int) -> None:
    config = job(SOURCES[kind](tmp_path / "in"), tmp_path / "out")
    whole = job(SOURCES[kind](tmp_path / "in"), tmp_path / "whole")
    run(whole)
    run(config, num_batches=num_batches)
    spooled = ids_spooled(tmp_path / "out")
    plan, begun = start(plan_of(config))
    made = [own for batch in make_rows(plan, 2) for own in batch["sample_id"].to_pylist()]
    expected = at_rest(tmp_path / "whole")
    assert not set(made) & spooled
    assert {*made, *spooled} == expected[0] | expected[1]
    assert len(made) + len(spooled) == len(expected[0]) + len(expected[1])
    save(plan, begun, make_rows(plan, 2))
    end(plan, begun)
    assert at_rest(tmp_path / "out") == expected
    texts = {own: row["generated_text"] for own, row in rows_in(tmp_path / "out/data").items()}
    assert texts == {own: row["generated_text"] for own, row in rows_in(tmp_path / "whole/data").items()}


@pytest.mark.parametrize("kind", SOURCES)
def test_finished_files_are_never_opened_again(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(SOURCES[kind](tmp_path / "in"), tmp_path / "out")
    run(config)
    opened: list[str] = []
    for name in ("open_file", "read_bounded"):
        true = getattr(access, name)
        monkeypatch.setattr(access, name, lambda fs, path, *a, true=true: opened.append(path) or true(fs, path, *a))
    plan = plan_of(config)
    assert plan.datasource.num_spans == 0
    assert [path for path in opened if str(tmp_path / "in") in path] == []


def test_one_open_tar_is_all_that_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(tars(tmp_path / "in"), tmp_path / "out")
    run(config, num_batches=3)  # one tar of nine rows makes three batches
    opened: list[str] = []
    true = access.open_file
    monkeypatch.setattr(access, "open_file", lambda fs, path, *a: opened.append(Path(path).name) or true(fs, path, *a))
    plan, _ = start(plan_of(config))
    make_rows(plan, 2)
    assert sorted({name for name in opened if name.endswith(".tar")}) == ["1.tar", "2.tar"]


def test_a_complete_output_takes_no_attempt(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    run(config)
    OutputDir(str(tmp_path / "out")).write_json("_job/summary.json", {"attempt": 1})
    plan = plan_of(config)
    assert is_complete(plan)
    assert resume_lines(plan)[:-1] == ["resuming: 30 samples are done, 0 missing, 0 files set aside"]


def test_a_limited_run_resumes_without_a_limit_and_the_reverse(tmp_path: Path) -> None:
    config = job(tars(tmp_path / "in"), tmp_path / "out")
    run(config, limit=11)
    assert len(at_rest(tmp_path / "out")[0]) == 11
    run(config)
    assert len(at_rest(tmp_path / "out")[0]) == 27
    assert plan_of(config, limit=4).datasource.num_spans == 0


def test_a_changed_file_is_refused_by_name_and_a_new_file_is_added(tmp_path: Path) -> None:
    config = job(tars(tmp_path / "in"), tmp_path / "out")
    run(config, num_batches=4)
    (tmp_path / "in/0-new.tar").write_bytes(tar_bytes([("x.png", RED)]))
    run(config)
    assert len(at_rest(tmp_path / "out")[0]) == 28
    assert sorted(path.name for path in (tmp_path / "out/_job/manifest").iterdir()) == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    (tmp_path / "in/1.tar").write_bytes(tar_bytes([("x.png", RED)]))
    with pytest.raises(ConfigError, match=r"^source\.path: 1\.tar changed since .*choose another sink\.path"):
        plan_of(config)


def test_a_file_that_is_gone_is_refused_unless_it_is_done(tmp_path: Path) -> None:
    config = job(tars(tmp_path / "in"), tmp_path / "out")
    run(config, num_batches=3)
    (tmp_path / "in/0.tar").unlink()
    plan_of(config)
    (tmp_path / "in/2.tar").unlink()
    with pytest.raises(ConfigError, match=r"^source\.path: 2\.tar was there when .* is not done, and is gone"):
        plan_of(config)


def test_a_row_of_a_new_file_whose_id_an_old_one_has_is_an_error(tmp_path: Path) -> None:
    source = {**parquet(tmp_path / "in", 5), "id_column": "id"}
    config = job(source, tmp_path / "out")
    run(config)
    write_parquet(tmp_path / "in/2.parquet", {"id": ["0-1", "new"], "image": [RED, RED]})
    run(config)
    good, bad = at_rest(tmp_path / "out")
    assert bad == {"2.parquet#0"}
    assert len(good) == 11


# --- another configuration -----------------------------------------------------------------------------------------


def test_another_configuration_is_refused_with_the_fields_and_both_values(tmp_path: Path) -> None:
    source = lines(tmp_path / "in")
    run(job(source, tmp_path / "out"), num_batches=1)
    other = job(source, tmp_path / "out", sampling={"temperature": 0.5, "max_new_tokens": 9})
    with pytest.raises(ConfigError) as refused:
        plan_of(other, revision="t1")
    assert "  revisions.target: 't0' then, 't1' now" in str(refused.value)
    assert "  sampling.max_new_tokens: 256 then, 9 now" in str(refused.value)
    assert "  sampling.temperature: 0.0 then, 0.5 now" in str(refused.value)
    assert str(refused.value).endswith("--allow-mixed")
    run(other, ResumeOptions(allow_mixed=True), revision="t1")
    rows = rows_in(tmp_path / "out/data")
    assert len(rows) == 30
    assert {row["attempt"] for row in rows.values()} == {1, 2}


def test_fields_outside_the_fingerprint_may_change(tmp_path: Path) -> None:
    source = lines(tmp_path / "in")
    run(job(source, tmp_path / "out"), num_batches=1)
    changed = {**source, "span_max_rows": 3, "fetch": {"timeout_s": 5.0}}
    run(job(changed, tmp_path / "out", pool={"slots": 9}, sink={"rows_per_file": 4}, job={"progress": False}))
    assert len(at_rest(tmp_path / "out")[0]) == 30


# --- torn and strange files ----------------------------------------------------------------------------------------


def test_torn_and_foreign_files_are_set_aside_and_named(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    run(config)
    data = tmp_path / "out/data"
    torn = data / "part-000001.parquet"
    torn.write_bytes(torn.read_bytes()[:-20])
    (data / "part-000002.parquet").write_bytes(b"")
    (data / "notes.txt").write_text("mine")
    write_parquet(data / "other.parquet", {"sample_id": ["a"]})
    plan = run(config)
    told_of = {file.relative: file.problem for file in plan.prior.inventory.strange}
    assert told_of.keys() == {
        f"data/{name}" for name in ("part-000001.parquet", "part-000002.parquet", "notes.txt", "other.parquet")
    }
    assert "torn" in told_of["data/part-000001.parquet"]
    assert told_of["data/other.parquet"] == "no job has signed it"
    assert len(at_rest(tmp_path / "out")[0]) == 30
    assert len(list((tmp_path / "out/_job/aside/data").iterdir())) == 4


def test_files_of_an_unknown_job_are_set_aside(tmp_path: Path) -> None:
    source = lines(tmp_path / "in")
    run(job(source, tmp_path / "out"), num_batches=2)
    run(job(source, tmp_path / "other", sampling={"temperature": 1.0}))
    (tmp_path / "out/data/part-000000.parquet").write_bytes((tmp_path / "other/data/part-000000.parquet").read_bytes())
    plan = run(job(source, tmp_path / "out"))
    [strange] = plan.prior.inventory.strange
    assert "which this output has no record of" in strange.problem
    assert {row["attempt"] for row in rows_in(tmp_path / "out/data").values()} == {1, 2}
    assert len(at_rest(tmp_path / "out")[0]) == 30


def test_an_attempt_killed_before_it_wrote_its_manifest_resumes(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    run(config, num_batches=0)
    (tmp_path / "out/_job/manifest/part-00000.parquet").unlink()
    run(config)
    assert len(at_rest(tmp_path / "out")[0]) == 30


def test_a_damaged_record_of_an_attempt_is_refused(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    run(config)
    (tmp_path / "out/_job/attempts/000001.json").write_text("{")
    with pytest.raises(ConfigError, match=r"attempts/000001\.json is damaged"):
        plan_of(config)


# --- rows that become several --------------------------------------------------------------------------------------


def prompts(folder: Path) -> dict[str, Any]:
    asked = [json.dumps(["a?", "b?", "c?", "d?", "e?"])] * 6
    write_parquet(folder / "a.parquet", {"image": [RED] * 6, "asked": asked})
    return {"kind": "parquet", "path": str(folder), "columns": {"image": "image"}}


@pytest.mark.parametrize("num_batches", [0, 1, 2, 5, 7])
def test_a_sample_of_several_rows_is_done_when_all_are_present_and_no_row_is_repeated(
    tmp_path: Path, num_batches: int
) -> None:
    source = prompts(tmp_path / "in")
    sections = {"prompt": {"text": "{prompt}"}, "columns": {"prompts": "asked"}}
    config = job(source, tmp_path / "out", **sections)
    run(config, num_batches=num_batches)
    plan, begun = start(plan_of(config))
    batches = make_rows(plan, 2)
    assert sum(batch.num_rows for batch in batches) == 30 - 4 * num_batches
    assert plan.datasource.num_samples == 6 - (4 * num_batches) // 5
    save(plan, begun, batches)
    end(plan, begun)
    assert at_rest(tmp_path / "out")[0] == {f"a.parquet#{row}#{asked}" for row in range(6) for asked in range(5)}


def test_only_failed_rows_of_a_prompt_are_decoded_again(tmp_path: Path) -> None:
    sections = {"prompt": {"text": "{prompt}"}, "columns": {"prompts": "asked"}}
    config = job(prompts(tmp_path / "in"), tmp_path / "out", **sections)
    run(config, fails=lambda own: own in ("a.parquet#2#1", "a.parquet#2#3", "a.parquet#5#0"))
    plan, begun = start(plan_of(config, ResumeOptions(retry_errors=True)))
    batches = make_rows(plan, 2)
    made = {own for batch in batches for own in batch["sample_id"].to_pylist()}
    assert made == {"a.parquet#2#1", "a.parquet#2#3", "a.parquet#5#0"}
    save(plan, begun, batches)
    end(plan, begun)
    assert at_rest(tmp_path / "out") == ({f"a.parquet#{row}#{asked}" for row in range(6) for asked in range(5)}, set())


# --- rows that failed ----------------------------------------------------------------------------------------------


def test_failed_rows_are_retried_only_on_request(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    run(config, fails=lambda own: own.endswith("7"))
    assert at_rest(tmp_path / "out")[1] == {"a.txt#7", "a.txt#17", "a.txt#27"}
    assert plan_of(config).datasource.num_spans == 0
    plan = run(config, ResumeOptions(retry_errors=True), fails=lambda own: own == "a.txt#17")
    assert plan.datasource.num_samples == 3
    good, bad = at_rest(tmp_path / "out")
    assert (len(good), bad) == (29, {"a.txt#17"})
    assert rows_in(tmp_path / "out/errors")["a.txt#17"]["attempt"] == 2
    run(config, ResumeOptions(retry_errors=True))
    assert (len(at_rest(tmp_path / "out")[0]), at_rest(tmp_path / "out")[1]) == (30, set())


@pytest.mark.parametrize("ends_in", ["the spool", "data"])
def test_a_retry_that_is_killed_leaves_no_row_twice_once_the_next_has_run(tmp_path: Path, ends_in: str) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    run(config, fails=lambda own: own.endswith("7"))
    if ends_in == "the spool":
        run(config, ResumeOptions(retry_errors=True), num_batches=1)
    else:
        plan, begun = start(plan_of(config, ResumeOptions(retry_errors=True)))
        save(plan, begun, make_rows(plan, 2)[:1])
    assert rows_in(tmp_path / "out/data").keys().isdisjoint({"a.txt#7"}) == (ends_in == "the spool")
    assert not is_complete(plan_of(config))
    run(config)
    good, bad = at_rest(tmp_path / "out")
    assert (len(good), bad) == (28, {"a.txt#17", "a.txt#27"})


def test_a_damaged_tar_is_read_again_from_where_it_broke(tmp_path: Path) -> None:
    config = job(tars(tmp_path / "in"), tmp_path / "out")
    whole = (tmp_path / "in/1.tar").read_bytes()
    time_ns = (tmp_path / "in/1.tar").stat().st_mtime_ns
    (tmp_path / "in/1.tar").write_bytes(whole[:4000] + bytes(len(whole) - 4000))
    os.utime(tmp_path / "in/1.tar", ns=(time_ns, time_ns))
    (tmp_path / "in/1.tar").write_bytes(whole[:4000] + b"\xff" * (len(whole) - 4000))
    os.utime(tmp_path / "in/1.tar", ns=(time_ns, time_ns))
    run(config)
    good, bad = at_rest(tmp_path / "out")
    assert len(bad) == 1
    assert len(good) < 27
    assert plan_of(config).datasource.num_spans == 0
    (tmp_path / "in/1.tar").write_bytes(whole)
    os.utime(tmp_path / "in/1.tar", ns=(time_ns, time_ns))
    run(config, ResumeOptions(retry_errors=True))
    assert (len(at_rest(tmp_path / "out")[0]), at_rest(tmp_path / "out")[1]) == (27, set())
    assert plan_of(config, ResumeOptions(retry_errors=True)).datasource.num_spans == 0


# --- attempts that overlap -----------------------------------------------------------------------------------------


def test_rows_that_another_attempt_finished_after_the_planning_are_not_made_again(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    planned = plan_of(config)
    run(config)
    later, begun = start(planned)
    assert not make_rows(later, begun.publisher.attempt)
    save(later, begun, [])
    end(later, begun)
    assert len(at_rest(tmp_path / "out")[0]) == 30


def test_two_attempts_that_overlap_leave_no_row_twice(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    old_plan, old = start(plan_of(config))
    batches = make_rows(old_plan, 1)
    [early] = old.publisher.spool(0, batches[:2])
    old.publisher.publish("data", 0, [early])
    old.publisher.spool(1, batches[2:3])
    new_plan, new = start(plan_of(config))
    assert new_plan.datasource.num_samples == 30 - 12
    late = old.publisher.spool(2, batches[3:])  # lands after the new attempt has looked
    with pytest.raises(Fenced):
        old.publisher.publish("data", 1, late)
    save(new_plan, new, make_rows(new_plan, 2))
    end(new_plan, new)
    assert len(at_rest(tmp_path / "out")[0]) == 30
    assert {row["attempt"] for row in rows_in(tmp_path / "out/data").values()} == {1, 2}
    assert [path.name for path in (tmp_path / "out/_job/aside").rglob("*") if path.is_file()] == []
    old.publisher.spool(3, batches)  # and after it has ended
    assert not is_complete(plan_of(config))
    run(config)
    assert len(at_rest(tmp_path / "out")[0]) == 30


def test_late_spool_files_are_published_without_rows_that_are_done(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    old_plan, old = start(plan_of(config))
    batches = make_rows(old_plan, 1)
    _, new = start(plan_of(config))
    new.publisher.spool(0, batches[:3])
    old.publisher.spool(0, batches[:1])
    plan = run(config)
    assert plan.datasource.num_samples == 30 - 12
    assert {file.drop for file in plan.prior.inventory.spooled} == {
        frozenset(),
        frozenset(f"a.txt#{row}" for row in range(4)),
    }
    assert len(at_rest(tmp_path / "out")[0]) == 30


def test_of_two_attempts_that_start_at_once_one_is_refused(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    first, second = plan_of(config), plan_of(config)
    true = OutputDir.list_attempts
    start(first)
    OutputDir.list_attempts = lambda output: []
    try:
        with pytest.raises(ConfigError, match="another job has taken attempt 1"):
            start(second)
    finally:
        OutputDir.list_attempts = true


def test_a_job_resumed_on_another_machine_resolves_its_gpus_again(tmp_path: Path) -> None:
    """The record keeps `auto` and the numbers of each attempt beside it; they are not part of the content."""
    config = job(lines(tmp_path / "in"), tmp_path / "out")
    here = Resources({"pool": 0.5}, ("pool",), "this machine has 1 GPU", num_cpus=3)
    there = Resources({"pool": 0.0}, ("pool",), "this machine has no GPU")
    for attempt, resources in enumerate((here, there), 1):
        plan = replace(plan_of(resources.apply(config)), resources=resources)
        assert plan.config.pool.num_gpus == plan.config.pool.gpus == resources.gpus["pool"]
        plan, begun = start(plan)
        write_provenance(plan, begun.publisher)
        record = json.loads((tmp_path / f"out/_job/attempts/{attempt:06d}.json").read_text())
        assert record["resources"] == {"num_gpus": resources.gpus, "auto": ["pool"], "there": resources.there}
        assert record["config"] == config.resolved()
        assert yaml.safe_load((tmp_path / "out/_job/config.yaml").read_text()) == config.resolved()
        assert record["config_fingerprint"] == config.fingerprint(plan.pair.revisions)
