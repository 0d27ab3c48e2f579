"""The choice of rows of an output: independent of order and of other rows, and the same for the same seed."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from configs.schema import CaptionJobConfig
from pipeline.output.recorded_job import read_job
from pipeline.verify import rows as rows_module
from pipeline.verify.bounds import detection_probability
from pipeline.verify.rows import RECORDED, SampleShare, count_chosen, has_tokens, rounds
from tests.pipeline.attempts import job, run

NAMES = [("a.txt", row) for row in range(700)] + [("b.txt", row) for row in range(300)]


def table(names: list[tuple[str, int]]) -> pa.Table:
    return pa.table(
        {"source": [name for name, _ in names], "row_index": pa.array([row for _, row in names], pa.int64())}
    )


def chosen(choice: SampleShare, names: list[tuple[str, int]], *part: int) -> set[tuple[str, int]]:
    mask = choice.chosen(table(names), *part)
    return set(zip(mask["source"].to_pylist(), mask["row_index"].to_pylist(), strict=True))


def test_whether_a_row_is_chosen_depends_on_seed_and_position_only() -> None:
    shuffled = random.Random(0).sample(NAMES, len(NAMES))
    chosen_rows = chosen(SampleShare(0.1, 3), NAMES)
    assert chosen_rows == chosen(SampleShare(0.1, 3), shuffled)
    assert chosen_rows & set(NAMES[:50]) == chosen(SampleShare(0.1, 3), NAMES[:50]), "other rows change nothing"
    assert chosen_rows < chosen(SampleShare(0.2, 3), NAMES), "a larger share has the rows of a smaller one"
    assert len(chosen_rows & chosen(SampleShare(0.1, 4), NAMES)) < 30, "another seed chooses others"
    assert chosen(SampleShare(1.0, 3), NAMES) == set(NAMES)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_row_is_chosen_with_the_stated_probability_over_seeds(share: float) -> None:
    num_seeds, row = 3000, [("a.txt", 17), ("a.txt", 18), ("b.txt", 17)]
    are_chosen = [chosen(SampleShare(share, seed), row) for seed in range(num_seeds)]
    for num_faulty in (1, 3):
        hits = sum(bool(is_chosen & set(row[:num_faulty])) for is_chosen in are_chosen) / num_seeds
        expected = detection_probability(share, num_faulty)
        assert abs(hits - expected) < 4 * (expected * (1 - expected) / num_seeds) ** 0.5


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_rounds_split_the_chosen_rows_without_overlap(share: float) -> None:
    whole, parts = (
        chosen(SampleShare(share, 5), NAMES),
        [chosen(SampleShare(share, 5), NAMES, part, 4) for part in range(4)],
    )
    assert set.union(*parts) == whole
    assert sum(map(len, parts)) == len(whole)
    assert all(0.15 < len(part) / len(whole) < 0.35 for part in parts)


def test_results_are_read_in_rounds(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()  # type: ignore[operator]
    (tmp_path / "in/a.txt").write_text("".join(f"line {row}\n" for row in range(60)))  # type: ignore[operator]
    config: CaptionJobConfig = job({"kind": "text", "path": f"{tmp_path}/in"}, f"{tmp_path}/out")
    run(config, fails=lambda own: own == "a.txt#7")
    output = read_job(f"{tmp_path}/out", "OUTPUT")
    monkeypatch.setattr(rows_module, "ROUND_SAMPLES", 10)
    choice = SampleShare(0.5, 1)
    num_rows, num_chosen = count_chosen(output, choice)
    assert num_rows == 59
    tables = list(rounds(output, choice, num_chosen))
    assert len(tables) == -(-num_chosen // 10)
    ids = [sample_id for table in tables for sample_id in table["sample_id"].to_pylist()]
    assert len(ids) == len(set(ids)) == num_chosen
    assert "a.txt#7" not in ids, "an error has no result to compare"
    assert all(table.schema == RECORDED for table in tables)
    assert not any(map(has_tokens, tables))
