"""Tests that an id occurs once in the output of several shards, and that its other rows are error rows."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import CaptionJobConfig
from pipeline.check.output import check_output
from pipeline.cluster.partitions import IN_PROCESS
from pipeline.output import output_ids, turns
from pipeline.output.files import list_published
from pipeline.output.publishing import Fenced, Publisher
from pipeline.output.turns import Turns, take_turn
from pipeline.run.job_plan import ResumeOptions
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import Shard
from tests.covering import by_tier
from tests.pipeline.attempts import at_rest, end, job, make_rows, plan_of, rows_in, run, save, start
from tests.pipeline.formats.shards import write_parquet
from tests.pipeline.run.test_recovery import named_tars

NAMES = [["a", "b", "c", "b"], ["a", "d", "c", "e"], ["e", "a", "f", "d"]]
"""Ids by file. `b` occurs twice in the first file; `a`, `c`, `d` and `e` occur in several files."""
SHARDS = [Shard(number, 3) for number in range(3)]
ORDERS = list(itertools.permutations(range(3)))


def tar_job(folder: Path, names: list[list[str]] = NAMES) -> CaptionJobConfig:
    """A job whose shards have one tar each."""
    return job(named_tars(folder / "in", *names), folder / "out", sink={"rows_per_file": 2})


def owners(names: list[list[str]], order: tuple[int, ...]) -> dict[str, str]:
    """The file that keeps each id if the shards of these files finish in this order."""
    kept: dict[str, str] = {}
    for number in order:
        for name in names[number]:
            kept.setdefault(name, f"{number}.tar")
    return kept


def check(config: CaptionJobConfig, names: list[list[str]]) -> None:
    """Every id has one row, every other sample is an error row with the name of its place, and the audit is clean."""
    good, bad = at_rest(Path(config.sink.path))
    result = check_output(OutputDir(config.sink.path))
    assert (result.problems, result.waiting, result.num_missing) == ([], [], 0)
    wanted = {name for names_of_tar in names for name in names_of_tar}
    assert len(good) + len(bad) == sum(map(len, names))
    assert wanted <= good | bad
    assert all("#" in own for own in (good | bad) - wanted)


@pytest.mark.parametrize("order", ORDERS)
def test_the_shard_that_finished_first_keeps_an_id_of_tars(tmp_path: Path, order: tuple[int, ...]) -> None:
    config = tar_job(tmp_path)
    for number in order:
        run(config, shard=SHARDS[number])
    check(config, NAMES)
    data, errors = (rows_in(tmp_path / "out" / folder) for folder in ("data", "errors"))
    assert {own: row["source"] for own, row in data.items()} == owners(NAMES, order)
    assert {row["error_type"] for row in errors.values()} == {"duplicate_id"}
    assert [plan_of(config, shard=shard).datasource.num_spans for shard in SHARDS] == [0, 0, 0]


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_ids_that_planning_reads_are_compared_over_all_shards(tmp_path: Path, kind: str, num_shards: int) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, names in enumerate(NAMES):
        if kind == "parquet":
            write_parquet(folder / f"{number}.parquet", {"id": names, "text": ["x"] * len(names)})
        else:
            lines = (json.dumps({"id": name, "text": "x"}) for name in names)
            (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    config = job({"kind": kind, "path": str(folder), "id_column": "id"}, tmp_path / "out")
    for number in reversed(range(num_shards)):
        run(config, shard=Shard(number, num_shards))
    check(config, NAMES)
    data = rows_in(tmp_path / "out/data")
    kept = owners(NAMES, (0, 1, 2))
    assert {own: row["source"] for own, row in data.items()} == {
        own: file.replace("tar", kind) for own, file in kept.items()
    }
    assert not list((tmp_path / "out/_job").glob("turns/*")), "no shard takes a turn if its ids are compared before"


def test_files_that_two_shards_add_at_the_same_time_are_compared_before_they_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_parquet(folder / "5.parquet", {"id": ["a"], "text": ["x"]})
    config = job({"kind": "parquet", "path": str(folder), "id_column": "id"}, tmp_path / "out")
    pair = [Shard(0, 2), Shard(1, 2)]
    run(config, shard=pair[0])
    write_parquet(folder / "9.parquet", {"id": ["b", "c"], "text": ["x", "x"]})
    first = plan_of(config, shard=pair[0])
    write_parquet(folder / "0.parquet", {"id": ["b", "d"], "text": ["x", "x"]})
    (folder / "9.parquet").rename(tmp_path / "9.parquet")
    second = plan_of(config, shard=pair[1])
    (tmp_path / "9.parquet").rename(folder / "9.parquet")
    for plan in (first, second):
        plan, begun = start(plan)
        save(plan, begun, make_rows(plan, begun.publisher.attempt))
        end(plan, begun)
    run(config, shard=pair[0])
    assert at_rest(tmp_path / "out") == ({"a", "b", "c", "d"}, {"0.parquet#0"})


@pytest.mark.parametrize("num_writes", by_tier(range(9), 2, 7))
def test_a_shard_that_is_killed_while_ids_are_compared_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    config = tar_job(tmp_path)
    run(config, shard=SHARDS[2])
    left = [num_writes]

    def dying(true: Any) -> Any:
        def write(*arguments: Any) -> Any:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return true(*arguments)

        return write

    plan, begun = start(plan_of(config, shard=SHARDS[1]))
    save(plan, begun, make_rows(plan, 1))
    with monkeypatch.context() as patched:
        for name in ("publish_rows", "rewrite"):
            patched.setattr(Publisher, name, dying(getattr(Publisher, name)))
        patched.setattr("pipeline.run.repeated_ids.take_turn", dying(take_turn))
        try:
            end(plan, begun)
        except KeyboardInterrupt:
            assert num_writes < 8
    run(config, shard=SHARDS[0])  # finishes between the death and the next attempt
    run(config, shard=SHARDS[1])
    check(config, NAMES)
    assert all(row["error_type"] == "duplicate_id" for row in rows_in(tmp_path / "out/errors").values())
    assert set(rows_in(tmp_path / "out/data")) == {name for names in NAMES for name in names}


@pytest.mark.parametrize("seed", by_tier(range(8), 0, 2))
def test_kills_overlaps_and_retries_of_shards_leave_every_id_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    names = [[chance.choice("abcdefghijkl") for _ in range(chance.randrange(3, 7))] for _ in range(4)]
    config = tar_job(tmp_path, names)
    delayed = []
    for _ in range(20):
        shard = chance.choice(SHARDS)
        fails = (lambda own: own in "abc") if chance.random() < 0.5 else (lambda own: False)
        resume = ResumeOptions(retry_errors=chance.random() < 0.3)
        act = chance.random()
        if act < 0.3:
            run(config, resume, fails, chance.randrange(3), shard=shard)
        elif act < 0.5:
            plan, begun = start(plan_of(config, resume, shard=shard))
            delayed.append((plan, begun, make_rows(plan, begun.publisher.attempt, fails)))
        elif act < 0.7 and delayed:
            plan, begun, batches = delayed.pop(chance.randrange(len(delayed)))
            try:
                save(plan, begun, batches)
                end(plan, begun)
            except Fenced:
                pass
        else:
            run(config, resume, fails, shard=shard)
        if chance.random() < 0.1:
            names.append([chance.choice("abcdefghijklmn") for _ in range(chance.randrange(1, 4))])
            more = named_tars(tmp_path / "more", *([[]] * (len(names) - 1)), names[-1])
            Path(more["path"], f"{len(names) - 1}.tar").rename(tmp_path / f"in/{len(names) - 1}.tar")
    for shard in SHARDS:
        run(config, shard=shard)
    check(config, names)
    for _ in range(2):  # errors of the engine become results; a repeated id stays an error
        for shard in chance.sample(SHARDS, 3):
            run(config, ResumeOptions(retry_errors=True), shard=shard)
    check(config, names)
    assert set(rows_in(tmp_path / "out/data")) == {name for names_of_tar in names for name in names_of_tar}


def test_turns_are_ordered_and_rank_rows_by_the_attempt_that_finished_them(tmp_path: Path) -> None:
    views = [OutputDir(str(tmp_path), shard) for shard in SHARDS]
    taken = [take_turn(views[shard], attempt) for shard, attempt in ((2, 1), (0, 3), (2, 2), (2, 5))]
    assert taken[-1] == Turns(((2, 1), (0, 3), (2, 2), (2, 5)))
    assert taken[1] == Turns(((2, 1), (0, 3)))
    assert taken[-1].shards == (0, 2)
    assert taken[-1].ranks(2, [1, 2, 3, 5, 6]).tolist() == [0, 2, 3, 3, turns.UNRANKED]
    assert taken[-1].ranks(0, [1, 3, 4]).tolist() == [1, 1, turns.UNRANKED]
    assert taken[-1].ranks(1, [1]).tolist() == [turns.UNRANKED]
    assert taken[-1].has(2, [0, 1, 2]).tolist() == [True, False, True]


def test_a_repeated_put_makes_one_turn_and_concurrent_turns_are_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = [OutputDir(str(tmp_path), shard) for shard in SHARDS]
    true = OutputDir.create_bytes

    def create(output: OutputDir, relative: str, data: Any) -> None:
        monkeypatch.setattr(OutputDir, "create_bytes", true)
        take_turn(views[1], 4)  # another shard finishes between the listing and the put
        true(output, relative, data)

    monkeypatch.setattr(OutputDir, "create_bytes", create)
    assert take_turn(views[0], 1) == Turns(((1, 4), (0, 1)))


def test_rows_that_another_shard_publishes_again_during_a_comparison_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other shard moves an error row, whose id counts, to a new file after this shard has listed the old one."""
    config = tar_job(tmp_path, [["a"], ["a", "b"]])
    pair = [Shard(0, 2), Shard(1, 2)]
    run(config, fails=lambda own: own == "a", shard=pair[0])
    _, begun = start(plan_of(config, shard=pair[0]))
    true = output_ids._read_part
    moved: list[str] = []

    def read(*arguments: Any) -> Any:
        for relative in () if moved else list_published(begun.publisher.output, "errors"):
            table = pq.read_table(pa.BufferReader(begun.publisher.output.read_bytes(relative)))
            if table.num_rows:
                begun.publisher.publish_rows("errors", begun.next_numbers["errors"], table)
                begun.publisher.empty(relative)
                moved.append(relative)
        return true(*arguments)

    monkeypatch.setattr(output_ids, "_read_part", read)
    run(config, shard=pair[1])
    assert len(moved) == 1
    assert at_rest(tmp_path / "out") == ({"b"}, {"a", "1.tar#0"})


def test_a_comparison_ends_although_files_keep_appearing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tar_job(tmp_path, [["a"], ["a", "b"]])
    run(config)
    output = OutputDir(config.sink.path)
    monkeypatch.setattr(output_ids, "MAX_LISTINGS", 3)
    for num_listings, ends in ((2, True), (3, False)):
        names = iter([["data/x.parquet"], ["data/y.parquet"], ["data/z.parquet"]][:num_listings])
        reader = output_ids.OutputIds(output, lambda names=names: next(names, []), IN_PROCESS, None)
        if ends:
            assert [table.num_rows for table in reader.hashes()] == [0, 0]
        else:
            with pytest.raises(RuntimeError, match="published 3 times while ids were compared; start the shard again"):
                list(reader.hashes())
