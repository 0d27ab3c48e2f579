"""States that an attempt can leave behind, and that the next one recovers from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from configs.schema import CaptionJob
from pipeline import repeated_ids
from pipeline.audit import audit
from pipeline.layout import OutputDir
from pipeline.publishing import Press
from pipeline.resume import Going
from tests.pipeline.attempts import at_rest, end, job, make_rows, plan_of, rows_in, run, save, start
from tests.pipeline.shards import encode, tar_bytes, write_parquet

RED = encode("red")


# --- one id in several tars ----------------------------------------------------------------------------------------


def named_tars(folder: Path, *files: list[str]) -> dict[str, Any]:
    """Tars of samples whose text member `name` is their id."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, names in enumerate(files):
        members = []
        for row, name in enumerate(names):
            members += [(f"{row:03}.png", RED), (f"{row:03}.name.txt", name.encode())]
        (folder / f"{number}.tar").write_bytes(tar_bytes(members))
    return {"kind": "webdataset", "path": str(folder), "id_column": "name", "span_max_rows": 1}


def check_repeats(config: CaptionJob) -> None:
    """Of the source below, the rows of 1.tar and 2.tar that repeat an id are error rows and all others results."""
    output = Path(config.sink.path)
    good, bad = at_rest(output)
    assert good == {"a", "b", "c", "d", "e", "f"}
    assert bad == {"1.tar#0", "1.tar#2", "2.tar#1"}
    rows = rows_in(output / "errors")
    assert {row["error_type"] for row in rows.values()} == {"duplicate_id"}
    assert {row["error_message"] for row in rows.values()} == {"the id 'a' is there twice", "the id 'c' is there twice"}
    assert {row["generated_text"] for row in rows.values()} == {""}
    assert rows_in(output / "data")["a"]["source"] == "0.tar"
    (output / "_job/config.yaml").write_text(yaml.safe_dump(config.resolved()))
    found = audit(OutputDir(str(output)))
    assert found.is_complete and not found.problems


def repeating(folder: Path) -> dict[str, Any]:
    return named_tars(folder, ["a", "b", "c"], ["a", "d", "c"], ["e", "a", "f"])


def test_a_row_of_a_tar_whose_id_an_earlier_tar_has_becomes_an_error_and_the_job_ends(tmp_path: Path) -> None:
    config = job(repeating(tmp_path / "in"), tmp_path / "out", sink={"rows_per_file": 2})
    run(config)
    check_repeats(config)
    assert plan_of(config).datasource.num_spans == 0


@pytest.mark.parametrize("num_writes", range(8))
def test_a_kill_while_repeated_ids_are_settled_is_recovered_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    config = job(repeating(tmp_path / "in"), tmp_path / "out", sink={"rows_per_file": 2})
    left = [num_writes]

    def dying(true: Any) -> Any:
        def write(*arguments: Any) -> Any:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return true(*arguments)

        return write

    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 1))
    with monkeypatch.context() as patched:
        patched.setattr(Press, "publish_table", dying(Press.publish_table))
        patched.setattr(Press, "rewrite", dying(Press.rewrite))
        try:
            end(plan, begun)
        except KeyboardInterrupt:
            assert num_writes < 7
    run(config)
    check_repeats(config)


def test_repeated_ids_are_settled_again_after_rows_that_failed_were_retried(tmp_path: Path) -> None:
    config = job(repeating(tmp_path / "in"), tmp_path / "out")
    run(config)
    run(config, Going(retry_errors=True))
    check_repeats(config)


def test_a_tar_that_comes_later_never_takes_the_id_of_a_finished_row(tmp_path: Path) -> None:
    source = repeating(tmp_path / "in")
    config = job(source, tmp_path / "out")
    run(config)
    (tmp_path / "in/0-new.tar").write_bytes((tmp_path / "in/2.tar").read_bytes())
    run(config)
    good, bad = at_rest(tmp_path / "out")
    assert good == {"a", "b", "c", "d", "e", "f"}
    assert bad == {"1.tar#0", "1.tar#2", "2.tar#1", "0-new.tar#0", "0-new.tar#1", "0-new.tar#2"}


def test_a_failed_row_keeps_its_error_and_loses_an_id_that_an_earlier_row_has(tmp_path: Path) -> None:
    config = job(repeating(tmp_path / "in"), tmp_path / "out")
    plan, begun = start(plan_of(config))
    batches = make_rows(plan, 1, fails=lambda own: own in ("a", "e"))
    save(plan, begun, batches)
    end(plan, begun)
    rows = rows_in(tmp_path / "out/errors")
    assert {own: row["error_type"] for own, row in rows.items()} == {
        "a": "engine_died",
        "e": "engine_died",
        "1.tar#0": "engine_died",
        "2.tar#1": "engine_died",
        "1.tar#2": "duplicate_id",
    }


def test_a_new_id_is_never_one_that_a_row_of_the_user_has(tmp_path: Path) -> None:
    config = job(named_tars(tmp_path / "in", ["a", "1.tar#0"], ["a"]), tmp_path / "out")
    run(config)
    assert at_rest(tmp_path / "out") == ({"a", "1.tar#0"}, {"1.tar#0#"})


def test_of_a_sample_of_several_rows_all_become_errors(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(2):
        members = [("0.png", RED), ("0.json", b'{"name": "a", "asked": ["x?", "y?"]}')]
        (folder / f"{number}.tar").write_bytes(tar_bytes(members))
    source = {"kind": "webdataset", "path": str(folder), "id_column": "name", "span_max_rows": 1}
    config = job(source, tmp_path / "out", prompt={"text": "{prompt}"}, columns={"prompts": "asked"})
    run(config)
    assert at_rest(tmp_path / "out") == ({"a#0", "a#1"}, {"1.tar#0#0", "1.tar#0#1"})
    assert plan_of(config).datasource.num_spans == 0


def test_repeats_are_found_by_place_whatever_file_of_the_output_they_are_in(tmp_path: Path) -> None:
    config = job(repeating(tmp_path / "in"), tmp_path / "out")
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 1)[::-1])
    end(plan, begun)
    check_repeats(config)
    assert repeated_ids.CODE == "duplicate_id"


# --- attempts that were planned at the same time -------------------------------------------------------------------


def lines(folder: Path, *names: str, count: int = 6) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.txt").write_text("".join(f"line {row}\n" for row in range(count)))
    return {"kind": "text", "path": str(folder)}


def listed(output: Path) -> list[str]:
    parts = sorted((output / "_job/manifest").iterdir())
    return [path for part in parts for path in pq.read_table(part)["path"].to_pylist()]


@pytest.mark.parametrize("older_is_planned_first", [True, False])
def test_attempts_planned_while_the_source_grows_keep_each_others_files(
    tmp_path: Path, older_is_planned_first: bool
) -> None:
    """One of two attempts has seen `0.txt` alone, the other one `9.txt` too; whichever begins first."""
    config = job(lines(tmp_path / "in", "5"), tmp_path / "out")
    run(config)
    lines(tmp_path / "in", "9")
    few = plan_of(config)
    lines(tmp_path / "in", "0")
    many = plan_of(config)
    first, second = (few, many) if older_is_planned_first else (many, few)
    first, begun = start(first)
    part = (tmp_path / "out/_job/manifest/part-00001.parquet").read_bytes()
    batches = make_rows(first, begun.press.attempt)
    save(first, begun, batches)  # finished and published, but not settled, when the second one begins
    published = {own for batch in batches for own in batch["sample_id"].to_pylist()}
    second, begun = start(second)
    assert (tmp_path / "out/_job/manifest/part-00001.parquet").read_bytes() == part
    assert second.earlier.inventory.strange == []
    batches = make_rows(second, begun.press.attempt)
    assert not published & {own for batch in batches for own in batch["sample_id"].to_pylist()}
    save(second, begun, batches)
    end(second, begun)
    run(config)
    assert sorted(listed(tmp_path / "out")) == ["0.txt", "5.txt", "9.txt"]
    assert len(at_rest(tmp_path / "out")[0]) == 18


def test_two_first_attempts_of_a_growing_source_share_one_manifest(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in", "5"), tmp_path / "out")
    few = plan_of(config)
    lines(tmp_path / "in", "0")
    many = plan_of(config)
    start(many)
    plan, begun = start(few)
    save(plan, begun, make_rows(plan, 2))
    end(plan, begun)
    assert listed(tmp_path / "out") == ["0.txt", "5.txt"]
    assert len(at_rest(tmp_path / "out")[0]) == 12


def test_a_part_that_appears_between_looking_and_writing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(lines(tmp_path / "in", "5"), tmp_path / "out")
    run(config)
    lines(tmp_path / "in", "9")
    few = plan_of(config)
    lines(tmp_path / "in", "0")
    many = plan_of(config)
    true = OutputDir.create_bytes

    def create(output: OutputDir, relative: str, data: Any) -> None:
        if relative.endswith("manifest/part-00001.parquet"):
            monkeypatch.setattr(OutputDir, "create_bytes", true)
            few.manifest.write(output)
        true(output, relative, data)

    monkeypatch.setattr(OutputDir, "create_bytes", create)
    plan, begun = start(many)
    save(plan, begun, make_rows(plan, 2))
    end(plan, begun)
    assert listed(tmp_path / "out") == ["5.txt", "9.txt", "0.txt"]
    assert len(at_rest(tmp_path / "out")[0]) == 18


def test_ids_of_files_that_two_attempts_added_at_the_same_time_are_compared_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_parquet(folder / "5.parquet", {"id": ["a"], "text": ["x"]})
    config = job({"kind": "parquet", "path": str(folder), "id_column": "id"}, tmp_path / "out")
    run(config)
    write_parquet(folder / "9.parquet", {"id": ["b"], "text": ["x"]})
    first = plan_of(config)
    (folder / "9.parquet").rename(tmp_path / "9.parquet")
    write_parquet(folder / "0.parquet", {"id": ["b"], "text": ["x"]})
    second = plan_of(config)
    (tmp_path / "9.parquet").rename(folder / "9.parquet")
    start(first)
    plan, begun = start(second)
    save(plan, begun, make_rows(plan, 3))
    end(plan, begun)
    assert at_rest(tmp_path / "out") == ({"a", "b"}, {"0.parquet#0"})
