"""Counting tokens: which files are read, which texts count, and what a list of them covers."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError
from jobs import vocabulary
from models.loading.vocabulary import TokenCount, read_tokens
from pipeline.training.token_counts import Counted, count_tokens, texts_of
from tests import toys


def table(path: Path, **columns: list[object]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_tokens_are_counted_without_special_ones_and_empty_texts_are_none() -> None:
    counted = count_tokens(["w10 w11 w10", "", "w12 w10"], toys.make_tokenizer())
    assert counted.num_texts == 2
    assert counted.tokens == (TokenCount(10, "w10", 3), TokenCount(11, "w11", 1), TokenCount(12, "w12", 1))


def test_a_share_of_the_counted_tokens_is_covered_by_the_fewest_most_frequent_tokens() -> None:
    counted = Counted(tuple(TokenCount(i, str(i), count) for i, count in enumerate([90, 5, 4, 1])), 1)
    assert [counted.size_for(share) for share in (0.5, 0.9, 0.901, 0.95, 0.99, 1.0)] == [1, 1, 2, 2, 3, 4]


def test_texts_come_from_outputs_tables_and_lines_in_the_order_given(tmp_path: Path) -> None:
    table(tmp_path / "job[1]/data/part-1.parquet", generated_text=["b", "", None])
    table(tmp_path / "job[1]/data/part-0.parquet", generated_text=["a"], other=[1])
    table(tmp_path / "job[1]/errors/part-0.parquet", generated_text=["never"])
    single = table(tmp_path / "one.parquet", generated_text=["c"])
    lines = tmp_path / "lines.txt"
    lines.write_bytes(b"d e\r\n\n\xff\n")
    texts = list(texts_of([str(tmp_path / "job[1]"), single, str(lines)], "generated_text"))
    assert texts == ["a", "b", "c", "d e", "", "�"]


def test_texts_come_from_stores_too() -> None:
    fsspec.filesystem("memory").pipe_file("/texts/one.txt", b"a\nb")
    assert list(texts_of(["memory://texts/one.txt"], "generated_text")) == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: str(folder / "gone"), "there is no such file or folder"),
        (lambda folder: str(folder), r"it is no output of a job: it holds no data/\*\.parquet"),
        (
            lambda folder: table(folder / "t.parquet", text=["a"]),
            "t.parquet: it has no column 'generated_text'; it has text",
        ),
        (lambda folder: table(folder / "t.parquet", generated_text=[1]), "holds int64, and no text"),
    ],
)
def test_sources_without_texts_are_refused_by_name(make: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        list(texts_of([make(tmp_path)], "generated_text"))  # type: ignore[operator]


def test_a_torn_table_is_refused_by_name(tmp_path: Path) -> None:
    torn = Path(table(tmp_path / "t.parquet", generated_text=["a"]))
    torn.write_bytes(torn.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"t\.parquet: it cannot be read"):
        list(texts_of([str(torn)], "generated_text"))


def test_the_command_writes_a_list_and_reports_its_coverage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = tmp_path / "target", tmp_path / "tokens.json"
    toys.save("llama", target)
    texts = tmp_path / "texts.txt"
    texts.write_text("w10 w10 w10\nw11\n")
    assert vocabulary.main(["--target", str(target), "--out", str(out), str(texts)]) == vocabulary.DONE
    assert read_tokens(str(out)) == [TokenCount(10, "w10", 3), TokenCount(11, "w11", 1)]
    assert json.loads(out.read_text())["counted"] == f"2 texts by the tokenizer of {target}"
    output = capsys.readouterr().out
    assert "texts         2 of 4 tokens, 2 of them different\n" in output
    assert "90 % by 2" in output


def test_the_command_refuses_unreadable_inputs_and_unwritable_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, texts, empty = tmp_path / "target", tmp_path / "texts.txt", tmp_path / "empty.txt"
    toys.save("llama", target)
    texts.write_text("w10\n")
    empty.write_text("\n\n")
    cases = {
        ("--target", str(tmp_path / "gone"), "--out", str(tmp_path / "a"), str(texts)): "refused: --target: ",
        ("--target", str(target), "--out", str(tmp_path / "a"), str(empty)): "there is no text to count",
        ("--target", str(target), "--out", str(tmp_path / "no" / "a"), str(texts)): "a cannot be written: No such file",
    }
    for arguments, reason in cases.items():
        assert vocabulary.main(arguments) == vocabulary.REFUSED
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
