"""Folders as Hugging Face's library itself writes them, and what may lie in them beside the rows."""

from __future__ import annotations

import json
import struct

import datasets
import pyarrow as pa
import pytest

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.formats import arrow
from pipeline.manifest import datasource, freezing
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.shards import encode, fetched, images_of, outcomes, read_all, write_parquet

RED, BLUE = encode("red"), encode("blue", (4, 2))


def hf_source(path: object, image: str | None = "image", **options) -> SourceConfig:
    return SourceConfig(kind="hf", path=str(path), columns=SourceColumnsConfig(image=image), **options)


def values(table: pa.Table, name: str) -> list:
    return [json.loads(fields)[name] for fields in table["fields"].to_pylist()]


@pytest.fixture(scope="module")
def dataset() -> datasets.Dataset:
    rows = {
        "image": [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": "b.png"}] * 5,
        "q": [str(n) for n in range(10)],
    }
    features = datasets.Features({"image": datasets.Image(), "q": datasets.Value("string")})
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.fixture(autouse=True)
def _no_bars() -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize("span_rows", [3, 1000])
def test_a_saved_dataset_is_read_from_its_arrow_files(tmp_path, dataset, span_rows) -> None:
    dataset.save_to_disk(str(tmp_path / "train"), num_shards=2)
    (tmp_path / "train" / "cache-1234.arrow").write_bytes(b"left over")
    source = hf_source(tmp_path, span_max_rows=span_rows)
    table = read_all(source, "{q}", keep=("q",))
    assert outcomes(table) == {f"train/data-0000{part}-of-00002.arrow#{row}": "" for part in (0, 1) for row in range(5)}
    assert images_of(table) == [[RED], [BLUE]] * 5
    assert values(table, "q") == table["q"].to_pylist() == [str(n) for n in range(10)]
    assert freezing.freeze(source, PromptOptions(PromptConfig(text="x"))).num_samples == 10


def test_parquet_of_the_hub_is_read_by_its_image_feature(tmp_path, dataset) -> None:
    (tmp_path / "data").mkdir()
    dataset.to_parquet(str(tmp_path / "data/train-00000-of-00001.parquet"))
    (tmp_path / "README.md").write_text("a card")
    table = read_all(hf_source(tmp_path), "{q}")
    assert images_of(table) == [[RED], [BLUE]] * 5
    message = r"^source\.columns\.image: the dataset has 'image', and no column is named for images"
    with pytest.raises(ConfigError, match=message):
        read_all(hf_source(tmp_path, None), "{q}")


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_an_image_folder_is_its_metadata_with_names_relative_to_it(tmp_path, form) -> None:
    folder = tmp_path / "train"
    (folder / "sub").mkdir(parents=True)
    (folder / "red.png").write_bytes(RED)
    (folder / "sub/blue.png").write_bytes(BLUE)
    (tmp_path / "secret.png").write_bytes(RED)
    rows = {"file_name": ["red.png", "sub/blue.png", "gone.png", "../../secret.png"], "q": list("abcd")}
    if form == "parquet":
        write_parquet(folder / "metadata.parquet", rows)
    elif form == "csv":
        lines = [",".join(pair) for pair in zip(*rows.values(), strict=True)]
        (folder / "metadata.csv").write_text("\n".join(["file_name,q", *lines]))
    else:
        pairs = zip(*rows.values(), strict=True)
        (folder / "metadata.jsonl").write_text("\n".join(json.dumps({"file_name": a, "q": b}) for a, b in pairs))
    source = hf_source(tmp_path, "file_name")
    table = fetched(read_all(source, "{q}"), source)
    codes = ["", "", "missing_image", "uri_refused"]
    assert outcomes(table) == {f"train/metadata.{form}#{row}": code for row, code in enumerate(codes)}
    assert images_of(table)[:2] == [[RED], [BLUE]]
    with pytest.raises(ConfigError, match=r"^source\.columns\.image: the dataset has 'file_name'"):
        read_all(hf_source(tmp_path, None), "{q}")


def test_mixed_formats_are_refused_and_a_glob_chooses(tmp_path, dataset) -> None:
    write_parquet(tmp_path / "a.parquet", {"image": [RED], "q": ["p"]})
    (tmp_path / "b.jsonl").write_text('{"q": "j", "image": "x.png"}\n')
    with pytest.raises(ConfigError, match=r"^source\.path: the folder holds \.jsonl and \.parquet files"):
        read_all(hf_source(tmp_path), "{q}")
    assert values(read_all(hf_source(f"{tmp_path}/*.parquet"), "{q}"), "q") == ["p"]


def ipc_bytes(table: pa.Table, stream: bool, batch_rows: int = 4) -> bytes:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("span_rows", [3, 100])
def test_streams_and_files_are_read_alike_wherever_they_lie(tmp_path, stream, span_rows) -> None:
    import fsspec

    data = ipc_bytes(pa.table({"q": [str(n) for n in range(10)]}), stream)
    (tmp_path / "x.arrow").write_bytes(data)
    fsspec.filesystem("memory").pipe_file("/arrow/x.arrow", data)
    local = read_all(hf_source(tmp_path, None, span_max_rows=span_rows), "{q}")
    assert values(local, "q") == [str(n) for n in range(10)]
    assert read_all(hf_source("memory://arrow", None, span_max_rows=span_rows), "{q}").equals(local)


@pytest.mark.parametrize("stream", [True, False])
def test_damaged_arrow_files_are_error_rows_and_never_a_crash(tmp_path, stream) -> None:
    whole = ipc_bytes(pa.table({"q": [f"text {n}" * 9 for n in range(10)], "n": list(range(10))}), stream)
    damages = [whole[:size] for size in (0, 3, 30, len(whole) // 2, len(whole) - 9)]
    damages += [whole[:index] + b"\xff" * 8 + whole[index + 8 :] for index in range(8, len(whole) - 8, 40)]
    for number, data in enumerate(damages):
        (tmp_path / f"{number:03}.arrow").write_bytes(data)
    source = hf_source(tmp_path, None)
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="x")))
    table = datasource.read_first(source, frozen, ("q", "n"), 10**6)
    codes = outcomes(table)
    assert len(frozen.files) == len(damages)
    assert set(codes.values()) <= {"", "broken_shard", "invalid_value"}
    assert {name.split("#")[0] for name in codes} >= {f"{number:03}.arrow" for number in range(4)}


def test_a_batch_with_invalid_offsets_is_refused() -> None:
    offsets = pa.py_buffer(struct.pack("<3i", 0, 100, 5))
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"hello")])
    with pytest.raises(pa.ArrowInvalid):
        arrow.check_batch(pa.record_batch({"q": broken}))


@pytest.mark.parametrize("name", [b"column", b"inside", b"values"])
@pytest.mark.parametrize("keep", [(), ("outer",)])
def test_an_arrow_file_whose_names_are_not_utf_8_is_one_error_row(tmp_path, name, keep) -> None:
    outer = pa.array([{"inside": [{"values": 1}]}] * 2)
    data = ipc_bytes(pa.table({"column": ["a", "b"], "outer": outer}), stream=True)
    assert name in data
    (tmp_path / "a.arrow").write_bytes(data.replace(name, b"\xed\xff" + name[2:]))
    (tmp_path / "b.arrow").write_bytes(data)
    table = read_all(hf_source(tmp_path, None), "x", keep)
    assert outcomes(table) == {"a.arrow#0": "broken_shard", "b.arrow#0": "", "b.arrow#1": ""}
