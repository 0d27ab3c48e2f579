"""Lance datasets where the library is installed, and a clear refusal where it is not."""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pytest

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.manifest import datasource, freezing
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.shards import encode, images_of, outcomes, read_all

RED = encode("red")


def lance_source(path: object, **options) -> SourceConfig:
    return SourceConfig(kind="lance", path=str(path), columns=SourceColumnsConfig(image="i"), **options)


def test_without_the_library_it_is_refused_with_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(
        ConfigError, match=r"^source\.kind: 'lance' needs the library of that name: pip install pylance"
    ):
        read_all(lance_source(tmp_path))


@pytest.fixture
def folder(tmp_path):
    lance = pytest.importorskip("lance")
    for name, count in (("a", 25), ("b", 3)):
        table = pa.table({"i": [RED] * count, "q": [f"{name}{row}" for row in range(count)]})
        lance.write_dataset(table, str(tmp_path / f"{name}.lance"), max_rows_per_file=10)
    return tmp_path


@pytest.mark.parametrize("span_rows", [4, 1000])
def test_datasets_of_a_folder_are_read_in_order_fragment_by_fragment(folder, span_rows) -> None:
    source = lance_source(folder, span_max_rows=span_rows, span_max_bytes=100_000)
    table = read_all(source, "{q}", keep=("q",))
    assert list(outcomes(table)) == [f"a.lance#{row}" for row in range(25)] + [f"b.lance#{row}" for row in range(3)]
    assert images_of(table) == [[RED]] * 28
    assert [json.loads(fields)["q"] for fields in table["fields"].to_pylist()] == table["q"].to_pylist()
    assert table["q"].to_pylist()[24:26] == ["a24", "b0"]
    assert freezing.freeze(source, PromptOptions(PromptConfig(text="x"))).num_samples == 28


def test_one_dataset_is_named_by_itself_and_pinned_to_its_version(folder) -> None:
    import lance

    source = lance_source(folder / "b.lance")
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="{q}")))
    lance.write_dataset(pa.table({"i": [RED], "q": ["new"]}), str(folder / "b.lance"), mode="overwrite")
    table = datasource.read_first(source, frozen, ("q",), 10)
    assert outcomes(table) == {f"b.lance#{row}": "" for row in range(3)}


@pytest.mark.parametrize("path", ["nothing.lance", "nothing", ""])
def test_paths_that_are_no_dataset_are_refused(folder, path) -> None:
    with pytest.raises(ConfigError, match=r"^source\.path: "):
        read_all(lance_source(folder / "deeper" / path if not path else folder / path))
