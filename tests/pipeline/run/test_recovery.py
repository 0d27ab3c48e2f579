"""States that an attempt can leave behind, and that the next one recovers from."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from configs.load import ConfigError
from configs.schema import CaptionJobConfig, PromptConfig
from configs.source import SourceConfig
from pipeline.check.output import check_output
from pipeline.manifest.done_bitmap import PathIndex
from pipeline.manifest.freezing import freeze
from pipeline.output import checksums
from pipeline.output.publishing import Publisher
from pipeline.prompts.row_options import PromptOptions
from pipeline.reports.summary import Summary
from pipeline.run import repeated_ids
from pipeline.run.job_plan import ResumeOptions
from pipeline.run.plan_text import source_lines
from pipeline.run.resume import is_complete, resume_lines
from pipeline.storage import listing
from pipeline.storage.listing import Skipped
from pipeline.storage.output_dir import OutputDir
from pipeline.synthesis import rows
from tests.covering import by_tier
from tests.pipeline.attempts import at_rest, end, job, make_rows, plan_of, rows_in, run, save, start, write_summary
from tests.pipeline.formats.shards import encode, tar_bytes, write_parquet
from tests.pipeline.run.test_resume import SOURCES

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


def check_repeats(config: CaptionJobConfig) -> None:
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
    result = check_output(OutputDir(str(output)))
    assert result.is_complete
    assert not result.problems


def repeating(folder: Path) -> dict[str, Any]:
    return named_tars(folder, ["a", "b", "c"], ["a", "d", "c"], ["e", "a", "f"])


def test_a_row_of_a_tar_whose_id_an_earlier_tar_has_becomes_an_error_and_the_job_ends(tmp_path: Path) -> None:
    config = job(repeating(tmp_path / "in"), tmp_path / "out", sink={"rows_per_file": 2})
    run(config)
    check_repeats(config)
    assert plan_of(config).datasource.num_spans == 0


@pytest.mark.parametrize("num_writes", by_tier(range(8), 2, 6))
def test_a_kill_while_repeated_ids_are_resolved_is_recovered_by_the_next_attempt(
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
        patched.setattr(Publisher, "publish_rows", dying(Publisher.publish_rows))
        patched.setattr(Publisher, "rewrite", dying(Publisher.rewrite))
        try:
            end(plan, begun)
        except KeyboardInterrupt:
            assert num_writes < 7
    run(config)
    check_repeats(config)


def test_repeated_ids_are_resolved_again_after_failed_rows_were_retried(tmp_path: Path) -> None:
    config = job(repeating(tmp_path / "in"), tmp_path / "out")
    run(config)
    run(config, ResumeOptions(retry_errors=True))
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


def test_all_rows_of_a_sample_with_a_repeated_id_become_errors(tmp_path: Path) -> None:
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


def test_rows_of_images_become_errors_without_an_image(tmp_path: Path) -> None:
    schema = rows.result_schema()
    row = {"sample_id": "a#1", "prompt_id": "a", "source": "1.tar", "row_index": 3, "replica": 1, "error_type": ""}
    row |= {"image": {"bytes": RED, "path": None}, "codes": [1], "status": "success", "num_generated_tokens": 4}
    table = pa.Table.from_pylist([row], schema)
    repeats = {(0, 3): "a#1"}
    taken = repeated_ids._Names(OutputDir(str(tmp_path)))
    [renamed_row] = repeated_ids.renamed(table, repeats, PathIndex(pa.chunked_array([["1.tar"]])), taken).to_pylist()
    assert (renamed_row["sample_id"], renamed_row["prompt_id"]) == ("1.tar#3#1", "1.tar#3")
    assert (renamed_row["status"], renamed_row["error_type"]) == ("error", "duplicate_id")
    assert (renamed_row["image"], renamed_row["codes"]) == (None, None)


def test_repeated_ids_are_found_by_source_position_in_any_order_of_output_files(tmp_path: Path) -> None:
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
    batches = make_rows(first, begun.publisher.attempt)
    save(first, begun, batches)  # finished and published, but not finalized, when the second one begins
    published = {own for batch in batches for own in batch["sample_id"].to_pylist()}
    second, begun = start(second)
    assert (tmp_path / "out/_job/manifest/part-00001.parquet").read_bytes() == part
    assert second.prior.inventory.strange == []
    batches = make_rows(second, begun.publisher.attempt)
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


def test_a_manifest_part_created_between_listing_and_writing_is_kept(
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


# --- damaged files -------------------------------------------------------------------------------------------------


def damage_text(path: Path, column: str = "generated_text") -> None:
    """Flip a byte in a page of a column that no one needs to know which rows there are."""
    metadata = pq.read_metadata(path).row_group(0)
    chunks = (metadata.column(index) for index in range(metadata.num_columns))
    column_chunk = next(chunk for chunk in chunks if chunk.path_in_schema == column)
    data = bytearray(path.read_bytes())
    start = column_chunk.dictionary_page_offset or column_chunk.data_page_offset
    data[start + column_chunk.total_compressed_size - 3] ^= 0x55
    path.write_bytes(bytes(data))


def test_a_spool_file_with_a_damaged_page_is_set_aside_and_its_rows_are_decoded_again(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in", "a", count=20), tmp_path / "out")
    run(config, num_batches=3)
    spooled = sorted((tmp_path / "out/_job/spool").glob("*/*.parquet"))
    damage_text(spooled[1])
    plan = run(config)
    assert [file.relative for file in plan.prior.inventory.strange] == [f"_job/spool/a0001/{spooled[1].name}"]
    assert len(at_rest(tmp_path / "out")[0]) == 20


def flip(path: Path) -> None:
    damage_text(path)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_other_rows(path: Path) -> None:
    """A whole file of the same rows with other texts: only a digest shows it."""
    table = pq.read_table(path)
    column = table.schema.get_field_index("generated_text")
    other = table.set_column(column, table.schema.field(column), [["other"] * table.num_rows])
    pq.write_table(other, path)


@pytest.mark.parametrize("damage", [flip, shorten, replace_by_other_rows])
@pytest.mark.parametrize("complete", [True, False])
def test_a_damaged_output_file_is_named_set_aside_and_its_rows_are_decoded_again(
    tmp_path: Path, damage: Any, complete: bool
) -> None:
    config = job(lines(tmp_path / "in", "a", count=25), tmp_path / "out")
    run(config)
    output = OutputDir(str(tmp_path / "out"))
    if complete:
        output.write_json("_job/summary.json", {"attempt": 1})
    expected = {own: row["generated_text"] for own, row in rows_in(tmp_path / "out/data").items()}
    damage(tmp_path / "out/data/part-000001.parquet")
    plan = plan_of(config)
    assert not is_complete(plan)
    assert [file.relative for file in plan.prior.inventory.strange] == ["data/part-000001.parquet"]
    assert any(line.startswith("  set aside: data/part-000001.parquet: it") for line in resume_lines(plan))
    assert plan.prior.verified.line().endswith("; 1 damaged")
    run(config)
    assert {own: row["generated_text"] for own, row in rows_in(tmp_path / "out/data").items()} == expected
    assert plan_of(config).prior.verified.problems == {}


def test_digests_are_skipped_on_request_and_sizes_are_not(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in", "a", count=25), tmp_path / "out")
    run(config)
    flip(tmp_path / "out/data/part-000000.parquet")
    shorten(tmp_path / "out/data/part-000001.parquet")
    verified = plan_of(config, ResumeOptions(skip_digests=True)).prior.verified
    assert list(verified.problems) == ["data/part-000001.parquet"]
    assert verified.num_bytes == 0
    assert "--skip-digests" in verified.line()


def test_each_published_byte_is_read_once_for_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(lines(tmp_path / "in", "a", count=25), tmp_path / "out")
    run(config)
    read: list[str] = []
    true = checksums.digest_of
    monkeypatch.setattr(
        checksums, "digest_of", lambda output, relative: read.append(relative) or true(output, relative)
    )
    plan, _ = start(plan_of(config))
    before = [name for name in read if name.startswith("data/")]
    assert sorted(set(before)) == sorted(before)
    size = sum(path.stat().st_size for path in (tmp_path / "out/data").glob("part-00000[012].parquet"))
    assert plan.prior.verified.num_bytes >= size


def test_a_file_that_another_attempt_rewrites_meanwhile_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(lines(tmp_path / "in", "a", count=25), tmp_path / "out")
    _, begun = start(plan_of(config))
    plan = plan_of(config)
    save(plan, begun, make_rows(plan, 1))
    true = checksums.digest_of

    def digest(output: OutputDir, relative: str) -> str:
        if relative == "data/part-000000.parquet":
            table = pq.read_table(tmp_path / "out" / relative)
            begun.publisher.rewrite(relative, table.slice(1))
        return true(output, relative)

    monkeypatch.setattr(checksums, "digest_of", digest)
    assert checksums.verify(OutputDir(str(tmp_path / "out"))).problems == {}


def test_a_damaged_checksum_note_is_rewritten(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in", "a", count=25), tmp_path / "out")
    run(config)
    note = tmp_path / "out/_job/files/data/part-000000.parquet.json"
    good = note.read_text()
    note.write_text("{")
    assert plan_of(config).prior.verified.unreadable == ("data/part-000000.parquet",)
    run(config)
    assert note.read_text() == good


def test_a_damaged_manifest_part_is_named_with_a_remedy_that_works(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in", "a", count=25), tmp_path / "out")
    run(config, num_batches=2)
    part = tmp_path / "out/_job/manifest/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"part-00000\.parquet is damaged: .*; move .*manifest and .*counts away"):
        plan_of(config)
    part.parent.rename(tmp_path / "manifest")
    plan = run(config)
    assert plan.datasource.num_samples == 25 - 8
    assert len(at_rest(tmp_path / "out")[0]) == 25


# --- a source that was copied --------------------------------------------------------------------------------------


def touch(folder: Path) -> None:
    for path in folder.rglob("*"):
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize("kind", ["lines", "images", "parquet", "tars"])
def test_a_source_with_changed_modification_times_resumes_on_request(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in")
    config = job(source, tmp_path / "out")
    run(config, num_batches=1)
    touch(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"choose another sink\.path, or, .* copied, go on with --accept-touched$"):
        plan_of(config)
    run(config, ResumeOptions(accept_touched=True))
    whole = job(source, tmp_path / "whole")
    run(whole)
    assert at_rest(tmp_path / "out") == at_rest(tmp_path / "whole")


def test_other_sizes_or_rows_are_refused_on_request_as_well(tmp_path: Path) -> None:
    config = job(lines(tmp_path / "in", "a", "b"), tmp_path / "out")
    run(config, num_batches=1)
    touch(tmp_path / "in")
    text = (tmp_path / "in/a.txt").read_text()
    (tmp_path / "in/a.txt").write_text(text.replace("line 1\n", "line1\n\n"))
    run(config, ResumeOptions(accept_touched=True))  # the same size and rows
    (tmp_path / "in/a.txt").write_text(text.replace("line 1\n", "line\n1\n"))
    with pytest.raises(ConfigError, match=r"^source\.path: a\.txt changed since"):
        plan_of(config, ResumeOptions(accept_touched=True))
    (tmp_path / "in/a.txt").write_text(text + "x")
    with pytest.raises(ConfigError, match=r"choose another sink\.path$"):
        plan_of(config, ResumeOptions(accept_touched=True))


# --- files that are not read, and rows that are missing ------------------------------------------------------------


def test_files_that_a_kind_does_not_take_are_counted_in_the_plan(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "_cache").mkdir(parents=True)
    for name in ("a.jpg", "b.jfif", "c.psd", "d.PSD", "_e.jpg", ".f.jpg", "README", "_cache/g.jpg"):
        (folder / name).write_bytes(RED)
    config = job({"kind": "images", "path": str(folder)}, tmp_path / "out")
    plan = plan_of(config)
    assert plan.manifest.files["path"].to_pylist() == ["_cache/g.jpg", "_e.jpg", "a.jpg", "b.jfif"]
    told_of = source_lines(plan)["skipped"]
    assert told_of == (
        "2 *.psd, 1 file that begins with a dot, 1 file without a suffix (source.kind 'images' does not read them)"
    )
    run(config)
    assert source_lines(plan_of(config))["skipped"] == told_of  # of an output that was begun as well
    plan, begun = start(plan_of(config))
    done = Summary("j", "m", "v", 1.0)
    write_summary(plan, done, begun.publisher)
    assert ("skipped", told_of) in done.lines()


def test_a_folder_without_usable_files_is_refused_with_its_suffixes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.psd").write_bytes(RED)
    with pytest.raises(ConfigError, match=r"; there are 1 \*\.psd"):
        plan_of(job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out"))


def test_suffixes_are_counted_together_beyond_a_number(tmp_path: Path) -> None:
    skipped = Skipped()
    for number in range(listing.MAX_SKIPPED_SUFFIXES + 5):
        skipped.add(f"a.x{number}")
    assert len(skipped.counts) == listing.MAX_SKIPPED_SUFFIXES + 1
    assert skipped.counts["files with other suffixes"] == 5


@pytest.mark.parametrize("name", ["a.jfif", "a.jpe", "a.pjpeg", "a.JFIF"])
def test_other_names_of_jpeg_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(RED)
    assert (
        freeze(
            SourceConfig.model_validate({"kind": "images", "path": str(tmp_path)}),
            PromptOptions(PromptConfig(text="?")),
        ).num_files
        == 1
    )


def broken(folder: Path) -> str:
    plan = plan_of(job({"kind": KINDS[folder.name], "path": str(folder)}, folder.parent / "out"))
    [message] = [
        row["error_message"]
        for span in range(plan.datasource.num_spans)
        for row in plan.datasource.read(span).to_pylist()
        if row["error_type"] == "broken_shard"
    ]
    return str(message)


KINDS = {"tars": "webdataset", "gz": "jsonl"}


def test_a_truncated_tar_is_reported_with_an_unknown_number_of_missing_rows(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    data = tar_bytes([(f"{row:03}.png", RED) for row in range(40)])
    (tmp_path / "tars/a.tar").write_bytes(data[: 512 * 21])
    assert broken(tmp_path / "tars").endswith("at least one row is missing; it does not say how many more")


def test_a_tar_damaged_in_the_middle_is_reported_with_an_estimate_of_missing_rows(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    data = bytearray(tar_bytes([(f"{row:03}.png", RED) for row in range(40)]))
    data[1024 * 10 : 1024 * 10 + 512] = b"\xff" * 512
    (tmp_path / "tars/a.tar").write_bytes(bytes(data))
    message = broken(tmp_path / "tars")
    assert "rows missing: about 3" in message
    assert "bytes not read" in message


def test_a_truncated_gzip_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gz").mkdir()
    text = "".join(f'{{"text": "{random.Random(row).random()}"}}\n' for row in range(3000)).encode()
    (tmp_path / "gz/a.jsonl.gz").write_bytes(gzip.compress(text)[:-4000])
    assert broken(tmp_path / "gz").endswith("at least one row is missing; it does not say how many more")


def test_files_cut_short_are_counted_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    data = tar_bytes([(f"{row:03}.png", RED) for row in range(40)])
    (tmp_path / "tars/a.tar").write_bytes(data[: 512 * 21])
    config = job({"kind": "webdataset", "path": str(tmp_path / "tars")}, tmp_path / "out")
    run(config)
    done = Summary("j", "m", "v", 1.0)
    plan, begun = start(plan_of(config))
    write_summary(plan, done, begun.publisher)
    assert done.num_broken_files == 1
    assert "damaged files" in dict(done.lines())


# --- columns of Arrow's view types ---------------------------------------------------------------------------------


def test_view_type_columns_are_read_as_plain_columns(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    names = pa.array(["a", "b", None, "a name that is longer than what a view holds itself"], pa.string_view())
    cells = pa.array([RED, RED, None, RED], pa.binary_view())
    media = pa.StructArray.from_arrays([cells, pa.array([None] * 4, pa.string_view())], ["bytes", "path"])
    tags = pa.array([["x"], [], None, ["y", "z"]], pa.list_view(pa.string_view()))
    for number, image in enumerate((cells, media)):
        table = pa.table({"name": names, "image": image, "tags": tags, "note": names})
        pq.write_table(table, folder / f"{number}.parquet")
        source = {"kind": "parquet", "path": str(folder / f"{number}.parquet"), "columns": {"image": "image"}}
        sink = {"keep_columns": ["tags", "note"]}
        config = job({**source, "id_column": "name"}, tmp_path / f"out{number}", prompt={"text": "{note}?"}, sink=sink)
        plan = plan_of(config)
        assert plan.manifest.keep.types == [pa.list_(pa.string()), pa.string()]
        rows = [row for span in range(plan.datasource.num_spans) for row in plan.datasource.read(span).to_pylist()]
        assert [row["error_type"] for row in rows] == ["", "", "missing_id", ""]
        assert rows[3]["sample_id"] == rows[3]["note"] == names[3].as_py()
        assert rows[3]["images"][0]["bytes"] == RED
        assert rows[3]["tags"] == ["y", "z"]
