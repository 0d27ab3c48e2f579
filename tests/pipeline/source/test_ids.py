"""Tests that repeated ids are found in any file, and that the first row in the manifest's order keeps the id."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import Prompt
from configs.source import Source
from pipeline.prompts.row_options import PromptOptions
from pipeline.source import ids, manifest
from tests.pipeline.sources.shards import outcomes, read_all, tar_bytes, write_parquet

FILES = st.lists(st.lists(st.sampled_from("abcdefg"), max_size=6), max_size=5)


def as_written(file: list[str]):
    return lambda: enumerate(file)


@given(FILES)
def test_every_row_but_the_first_of_an_id_is_a_repeat(files) -> None:
    seen: set[str] = set()
    expected: dict[int, list[int]] = {}
    for number, file in enumerate(files):
        for row, own_id in enumerate(file):
            if own_id in seen:
                expected.setdefault(number, []).append(row)
            seen.add(own_id)
    assert ids.find_repeats([as_written(file) for file in files]) == expected


@given(FILES)
def test_equal_hashes_of_other_ids_repeat_nothing(files) -> None:
    class Clash(str):
        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            return str(self) == str(other)

    plain = ids.find_repeats([as_written(file) for file in files])
    clashing = [[Clash(own_id) for own_id in file] for file in files]
    assert ids.find_repeats([as_written(file) for file in clashing]) == plain


def write(folder, kind: str, name: str, ids: list) -> None:
    if kind == "parquet":
        write_parquet(folder / f"{name}.parquet", {"k": ids}, row_group_size=2)
    elif kind == "jsonl":
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"k": one}) + "\n" for one in ids))
    else:
        (folder / f"{name}.csv").write_text("k,x\n" + "".join(f"{'' if one is None else one},\n" for one in ids))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("span_rows", [1, 3, 1000])
def test_repeats_in_other_spans_and_files_are_error_rows(tmp_path, kind, span_rows) -> None:
    write(tmp_path, kind, "a", ["p", "q", None, "p", "r"])
    write(tmp_path, kind, "b", ["s", "q"])
    write(tmp_path, kind, "c", ["q", "t"])
    source = Source(kind=kind, path=str(tmp_path), id_column="k", span_max_rows=span_rows)
    assert outcomes(read_all(source)) == {
        "p": "",
        "q": "",
        f"a.{kind}#2": "missing_id",
        f"a.{kind}#3": "duplicate_id",
        "r": "",
        "s": "",
        f"b.{kind}#1": "duplicate_id",
        f"c.{kind}#0": "duplicate_id",
        "t": "",
    }


def test_without_the_check_only_repeats_within_a_span_are_found(tmp_path) -> None:
    write(tmp_path, "jsonl", "a", ["p", "p", "q"])
    write(tmp_path, "jsonl", "b", ["q"])
    source = Source(kind="jsonl", path=str(tmp_path), id_column="k", check_ids=False, span_max_rows=3)
    table = read_all(source)
    assert table["sample_id"].to_pylist() == ["p", "a.jsonl#1", "q", "q"]
    assert manifest.freeze(source, PromptOptions(Prompt(text="x"))).files["repeated_rows"].to_pylist() == [[], []]


def test_a_damaged_file_does_not_hide_repeats_in_others(tmp_path) -> None:
    write(tmp_path, "parquet", "a", ["p"])
    (tmp_path / "b.parquet").write_bytes(b"torn")
    write(tmp_path, "parquet", "c", ["p"])
    codes = outcomes(read_all(Source(kind="parquet", path=str(tmp_path), id_column="k")))
    assert codes == {"p": "", "b.parquet#0": "broken_shard", "c.parquet#0": "duplicate_id"}


def test_a_column_that_is_no_id_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(manifest, "MAX_REPEATED_ROWS", 3)
    write(tmp_path, "csv", "a", ["cat", "dog"] * 5)
    with pytest.raises(
        ConfigError, match=r"^source\.id_column: 'k' is no id: 8 of 10 rows have one that an earlier row"
    ):
        read_all(Source(kind="csv", path=str(tmp_path), id_column="k"))


def test_an_id_that_looks_like_one_of_ours_does_not_make_two_of_it(tmp_path) -> None:
    write(tmp_path, "jsonl", "a", ["a.jsonl#1", None, "p", "p"])
    codes = outcomes(read_all(Source(kind="jsonl", path=str(tmp_path), id_column="k")))
    assert codes == {"a.jsonl#1": "", "a.jsonl#1#": "missing_id", "p": "", "a.jsonl#3": "duplicate_id"}


def test_ids_of_tars_are_not_read_beforehand(tmp_path) -> None:
    for name in "ab":
        members = [(f"{name}.jpg", b"x"), (f"{name}.json", b'{"k": "same"}')]
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes(members))
    source = Source(kind="webdataset", path=str(tmp_path), id_column="k", span_max_rows=1)
    frozen = manifest.freeze(source, PromptOptions(Prompt(text="x")))
    assert frozen.files["repeated_rows"].to_pylist() == [[], []]
