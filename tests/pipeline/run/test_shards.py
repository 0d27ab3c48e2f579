"""Several drivers write the shards of one output; together they behave as one job."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import duckdb
import pandas as pd
import pytest

from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from pipeline.check.output import check_output
from pipeline.output.files import Format
from pipeline.output.publishing import Fenced, Publisher
from pipeline.reports.summary import Summary
from pipeline.run.job_plan import ResumeOptions
from pipeline.run.plan_checks import open_output
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import WHOLE, Shard
from tests.covering import by_tier
from tests.pipeline.attempts import at_rest, end, job, make_rows, plan_of, rows_in, run, save, start, write_summary

NUM_SHARDS = 3
SHARDS = [Shard(number, NUM_SHARDS) for number in range(NUM_SHARDS)]


def config_in(folder: Path, num_rows: tuple[int, ...] = (17, 1, 22), **sections: object) -> CaptionJobConfig:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(num_rows):
        if not (folder / f"in/{number}.txt").exists():
            (folder / f"in/{number}.txt").write_text("".join(f"line {number} {row}\n" for row in range(count)))
    return job({"kind": "text", "path": str(folder / "in"), "span_max_rows": 4}, folder / "out", **sections)


def test_shards_write_one_output_that_opens_as_it_is(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    for shard in (SHARDS[2], SHARDS[0]):
        run(config, fails=lambda own: own.endswith("#7"), shard=shard)
    result = check_output(OutputDir(config.sink.path))
    assert (result.problems, result.num_missing) == ([], 13)
    assert "shard 1/3: not started; run the job with --shard 1/3" in result.waiting
    assert result.missing[0] == "0.txt#13"
    run(config, fails=lambda own: own.endswith("#7"), shard=SHARDS[1])
    result = check_output(OutputDir(config.sink.path))
    assert (result.problems, result.num_missing, result.waiting, result.is_complete) == ([], 0, [], True)
    assert result.num_rows == {"data": 38, "errors": 2}
    good, bad = at_rest(tmp_path / "out")
    assert bad == {"0.txt#7", "2.txt#7"}
    data = tmp_path / "out/data"
    assert set(pd.read_parquet(data)["sample_id"]) == good
    assert duckdb.sql(f"select count(*) from '{data}/*.parquet'").fetchall() == [(38,)]
    run(config_in(tmp_path / "whole"), fails=lambda own: own.endswith("#7"))
    texts = {name: row["generated_text"] for name, row in rows_in(tmp_path / "whole/out/data").items()}
    assert {name: row["generated_text"] for name, row in rows_in(data).items()} == texts


def test_a_finished_shard_has_nothing_left_and_an_empty_one_is_complete(tmp_path: Path) -> None:
    config = config_in(tmp_path, (2,))
    for shard in SHARDS:
        run(config, shard=shard)
        assert plan_of(config, shard=shard).datasource.num_spans == 0
    assert check_output(OutputDir(config.sink.path)).is_complete
    assert len(at_rest(tmp_path / "out")[0]) == 2


@pytest.mark.parametrize("seed", by_tier(range(5), 1, 1))
def test_kills_and_overlapping_attempts_of_shards_cost_no_row_and_double_none(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    config = config_in(tmp_path, tuple(chance.randrange(1, 30) for _ in range(4)))
    left = set(SHARDS)
    delayed = []
    for _ in range(24):
        shard = chance.choice(SHARDS)
        fails = (lambda own: own.endswith("3")) if chance.random() < 0.5 else (lambda own: False)
        act = chance.random()
        if act < 0.35:  # killed after some batches
            run(config, fails=fails, num_batches=chance.randrange(5), shard=shard)
            left.add(shard)
        elif act < 0.6:  # an attempt that is delayed and goes on later, beside others
            plan, begun = start(plan_of(config, shard=shard))
            delayed.append((plan, begun, make_rows(plan, begun.publisher.attempt, fails)))
            left.add(shard)
        elif act < 0.8 and delayed:
            plan, begun, batches = delayed.pop(chance.randrange(len(delayed)))
            try:
                save(plan, begun, batches)
                end(plan, begun)
                left.discard(plan.output.shard)
            except Fenced:
                pass
        else:
            run(config, fails=fails, shard=shard)
            left.discard(shard)
        if chance.random() < 0.1:
            number = len(list((tmp_path / "in").iterdir()))
            (tmp_path / f"in/{number}.txt").write_text("".join(f"new {row}\n" for row in range(chance.randrange(1, 9))))
            left = set(SHARDS)
    for shard in SHARDS:
        run(config, shard=shard)
    result = check_output(OutputDir(config.sink.path))
    assert (result.problems, result.num_missing, result.waiting) == ([], 0, [])
    good, bad = at_rest(tmp_path / "out")
    wanted = {
        f"{path.name}#{row}"
        for path in (tmp_path / "in").iterdir()
        for row in range(len(path.read_text().splitlines()))
    }
    assert good | bad == wanted
    aside = [path.name for path in (tmp_path / "out/_job").rglob("aside/**/*") if path.is_file()]
    assert not any("part-" in name for name in aside), "nothing that was published is set aside"


def test_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run(config, shard=SHARDS[0])
    with pytest.raises(ConfigError, match=r"was begun with 3 shards; go on with --shard I/3"):
        plan_of(config, shard=Shard(0, 4))
    with pytest.raises(ConfigError, match=r"was begun with 3 shards; go on with --shard I/3"):
        plan_of(config)
    other = config_in(tmp_path / "other")
    run(other)
    with pytest.raises(ConfigError, match="was begun without shards; go on with no --shard"):
        plan_of(other, shard=SHARDS[0])


def test_two_first_attempts_with_other_numbers_of_shards_do_not_both_start(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    first, second = plan_of(config, shard=SHARDS[0]), plan_of(config, shard=Shard(1, 2))
    start(first)
    with pytest.raises(ConfigError, match="was begun with 3 shards"):
        start(second)


def test_shards_of_one_output_have_one_configuration(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    late = plan_of(config_in(tmp_path, sampling={"max_new_tokens": 7}), shard=SHARDS[2])
    run(config, shard=SHARDS[0])
    other = config_in(tmp_path, sampling={"max_new_tokens": 7})
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens"):
        plan_of(other, shard=SHARDS[1])
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens"):
        start(late)
    run(other, ResumeOptions(allow_mixed=True), shard=SHARDS[1])


def test_foreign_files_beside_shards_are_named(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    for shard in SHARDS:
        run(config, shard=shard)
    (tmp_path / "out/data/shard-0003-part-000000.parquet").write_bytes(b"x")
    (tmp_path / "out/data/part-000000.parquet").write_bytes(b"x")
    (tmp_path / "out/data/shard-0001-part-000044.parquet").write_bytes(b"x")
    problems = check_output(OutputDir(config.sink.path)).problems
    assert any(line.startswith("data/shard-0003-part-000000.parquet: it belongs to no shard") for line in problems)
    assert any(line.startswith("data/part-000000.parquet: it belongs to no shard") for line in problems)
    assert any(line.startswith("shard 1/3: data/part-000044.parquet: it is torn") for line in problems)


def test_a_limit_and_a_dry_run_take_the_first_samples_of_the_shard(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    plan = plan_of(config, shard=SHARDS[2], limit=3)
    assert plan.datasource.num_samples == 3
    first = plan.read_first(2)["sample_id"].to_pylist()
    assert first == plan.datasource.read(0)["sample_id"].to_pylist()[:2]
    for shard in SHARDS:
        run(config, shard=shard, limit=3)
    result = check_output(OutputDir(config.sink.path))
    assert (result.num_missing, result.num_rows["data"]) == (0, 9)
    for shard in SHARDS:
        run(config, shard=shard)
    assert check_output(OutputDir(config.sink.path)).num_rows["data"] == 40


def test_a_broken_file_counts_in_its_own_shard(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number}.txt.gz").write_bytes(gzip.compress(f"line {number}\n".encode() * 200))
    whole = (tmp_path / "in/2.txt.gz").read_bytes()
    (tmp_path / "in/2.txt.gz").write_bytes(whole[:-12])
    config = job({"kind": "text", "path": str(tmp_path / "in")}, tmp_path / "out")
    numbers = []
    for shard in SHARDS:
        plan = run(config, shard=shard)
        done = Summary(plan.identity.job_id, "none", "exact", 1.0)
        write_summary(plan, done, Publisher(plan.output, Format(plan.schema), 1, plan.identity.fingerprint))
        numbers.append(done.num_broken_files)
    assert numbers == [0, 0, 1]
    assert check_output(OutputDir(config.sink.path)).is_complete


def test_a_folder_with_other_files_is_refused_and_one_with_shards_is_not(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    (tmp_path / "out/data").mkdir(parents=True)
    (tmp_path / "out/data/mine.parquet").write_bytes(b"x")
    for shard in (WHOLE, SHARDS[1]):
        with pytest.raises(ConfigError, match=r"is not empty: it holds data/mine\.parquet"):
            open_output(config, shard)
    (tmp_path / "out/data/mine.parquet").unlink()
    run(config, shard=SHARDS[0])
    assert open_output(config, SHARDS[1]).shard == SHARDS[1]
    open_output(config)  # planning refuses it with the number of shards
    with pytest.raises(ConfigError, match="was begun with 3 shards"):
        plan_of(config)
