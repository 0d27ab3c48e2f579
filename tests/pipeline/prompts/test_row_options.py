"""Tests prompt options per row, from files to decoded rows: several prompts, sampling options, conversations."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from actors.media import Media
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig, PromptConfig, RowColumnsConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.media import image_decoding
from pipeline.prompts.row_options import PromptOptions
from tests.actors.fakes import fake_job
from tests.pipeline.formats.shards import encode, read_all, write_parquet

RED, BLUE = encode("red"), encode("blue", (4, 2))


def decoded(source: SourceConfig, prompt_options: PromptOptions, keep: tuple[str, ...] = ()) -> pa.Table:
    return image_decoding.decode_table(
        read_all(source, prompt_options, keep),
        image_decoding.DecodeOptions.of(source, str(source.path), prompt_options),
    )


def texts(table: pa.Table) -> list[str | None]:
    """The last turn's text of every row."""
    return [
        json.loads(messages)[-1]["content"][-1]["text"] if messages else None
        for messages in table["messages"].to_pylist()
    ]


def jsonl(tmp_path, rows: list[dict], **options) -> SourceConfig:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return SourceConfig(kind="jsonl", path=str(tmp_path), **options)


def test_each_of_several_prompts_is_a_row_with_its_number_in_the_id(tmp_path) -> None:
    columns = {
        "id": ["a", "b", "c", "d", "e"],
        "image": [RED, BLUE, RED, RED, b"junk"],
        "ask": [["one?", "two?"], ["three?"], [], None, ["x", "y"]],
    }
    write_parquet(tmp_path / "x.parquet", columns)
    source = SourceConfig(
        kind="parquet", path=str(tmp_path), columns=SourceColumnsConfig(image="image"), id_column="id"
    )
    prompt_options = PromptOptions(PromptConfig(text="Q: {prompt} ({id})"), RowColumnsConfig(prompts="ask"))
    table = decoded(source, prompt_options, keep=("id",))
    assert table["sample_id"].to_pylist() == ["a#0", "a#1", "b#0", "c", "d", "e"]
    assert table["prompt_index"].to_pylist() == [0, 1, 0, None, None, None]
    assert table["num_prompts"].to_pylist() == [2, 2, 1, None, None, None]
    assert texts(table) == ["Q: one? (a)", "Q: two? (a)", "Q: three? (b)", None, None, None]
    assert table["error_type"].to_pylist() == [""] * 3 + ["missing_column_value"] * 2 + ["not_an_image"]
    assert table["id"].to_pylist() == ["a", "a", "b", "c", "d", "e"]
    # Pixels are stored once for all prompts of a sample, and all of its rows see them.
    assert [[image.shape for image in image_decoding.pixels(cell)] for cell in table["images"].to_pylist()] == [
        [(6, 8, 3)],
        [],
        [(2, 4, 3)],
        *[[]] * 3,
    ]
    shown = [Media(table).of(index).images for index in range(table.num_rows)]
    assert [[image.shape for image in images] for images in shown] == [*[[(6, 8, 3)]] * 2, [(2, 4, 3)], *[[]] * 3]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ('["a", "b"]', ""),
        ("plain text", "invalid_value"),
        ("[" * 5000, "invalid_value"),
        (7, "invalid_value"),
        ({"a": 1}, "invalid_value"),
        (["a", None], "missing_column_value"),
        (["x"] * 1025, "invalid_value"),
        ([["nested"]], ""),
    ],
)
def test_the_prompts_column_holds_a_list_of_texts_as_value_or_json(tmp_path, value, code) -> None:
    source = jsonl(tmp_path, [{"p": value}])
    table = decoded(source, PromptOptions(PromptConfig(text="{prompt}"), RowColumnsConfig(prompts="p")))
    assert set(table["error_type"].to_pylist()) == {code}
    if not code:
        assert len(texts(table)) == len(json.loads(value) if isinstance(value, str) else value)


def test_rows_have_seeds_and_sampling_values_of_their_own_or_the_jobs(tmp_path) -> None:
    names = RowColumnsConfig(seed="s", temperature="t", max_new_tokens="n", top_k="k")
    rows = [
        {"s": 7, "t": 0.5, "n": 9, "k": 0},
        {"s": "8", "t": "1", "n": 9.0},
        {},
        {"s": 2**63 - 1, "t": 0},
    ]
    job = fake_job(sampling={"max_new_tokens": 33, "temperature": 0.25}, columns=names.model_dump(), job={"seed": 5})
    table = decoded(jsonl(tmp_path, rows), PromptOptions.of(job))
    samplings = [json.loads(values) for values in table["sampling"].to_pylist()]
    assert samplings == [
        {"seed": 7, "temperature": 0.5, "top_k": 0, "max_new_tokens": 9},
        {"seed": 8, "temperature": 1.0, "top_k": 0, "max_new_tokens": 9},
        {"seed": 5, "temperature": 0.25, "top_k": 0, "max_new_tokens": 33},
        {"seed": 2**63 - 1, "temperature": 0.0, "top_k": 0, "max_new_tokens": 33},
    ]


@pytest.mark.parametrize(
    "row",
    [
        *({"s": value} for value in (-1, 2**63, 0.5, True, "x")),
        *({"t": value} for value in (-0.1, "hot", 1e999, [1])),
        *({"n": value} for value in (0, 1.5, 10**30, "9" * 50)),
        {"k": -1},
    ],
    ids=str,
)
def test_sampling_values_that_make_no_sense_are_row_errors(tmp_path, row) -> None:
    names = RowColumnsConfig(seed="s", temperature="t", max_new_tokens="n", top_k="k")
    everything = {"s": 1, "t": 1, "n": 1, "k": 1}
    table = decoded(jsonl(tmp_path, [everything, row, everything]), PromptOptions(PromptConfig(text="x"), names))
    assert table["error_type"].to_pylist() == ["", "invalid_sampling", ""]
    assert table["sampling"].to_pylist()[1] == ""


def test_conversations_bring_their_own_turns_and_media(tmp_path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    rows = [
        {
            "m": [{"role": "user", "content": [{"type": "image", "url": "blue.png"}, {"type": "image"}, "both?"]}],
            "i": "red.png",
        },
        {"m": [{"from": "human", "value": "<image>\nthis?"}], "i": ["red.png"]},
        {"m": [{"from": "human", "value": "<image><image>"}], "i": "red.png"},
        {"m": [{"role": "user", "content": [{"type": "image", "url": "../x.png"}]}], "i": "red.png"},
        {"m": [{"role": "user", "content": "no place"}], "i": "red.png"},
    ]
    source = jsonl(tmp_path, rows, columns=SourceColumnsConfig(image="i"))
    table = decoded(source, PromptOptions(None, RowColumnsConfig(messages="m")))
    assert table["error_type"].to_pylist() == ["", "", "invalid_value", "invalid_value", ""]
    shapes = [[image.shape for image in image_decoding.pixels(cell)] for cell in table["images"].to_pylist()]
    assert shapes == [[(2, 4, 3), (6, 8, 3)], [(6, 8, 3)], [], [], [(6, 8, 3)]]
    assert texts(table) == ["both?", "this?", None, None, "no place"]
    kinds = [[part["type"] for part in json.loads(row)[-1]["content"]] for row in table["messages"].to_pylist() if row]
    assert kinds == [["image", "image", "text"], ["image", "text"], ["image", "text"]]


def test_a_conversation_with_uris_needs_no_image_column(tmp_path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    rows = [
        {"m": [{"role": "user", "content": [{"type": "image", "url": uri}, "x"]}]} for uri in ("red.png", "../x.png")
    ]
    table = decoded(jsonl(tmp_path, rows), PromptOptions(None, RowColumnsConfig(messages="m")))
    assert table["error_type"].to_pylist() == ["", "uri_refused"]


def test_conversations_of_typed_columns_are_read_alike(tmp_path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    write_parquet(tmp_path / "x.parquet", {"m": pa.array([turns, turns[:1], None])})
    source = SourceConfig(kind="parquet", path=str(tmp_path))
    table = decoded(source, PromptOptions(None, RowColumnsConfig(messages="m")))
    assert [len(json.loads(row)) if row else None for row in table["messages"].to_pylist()] == [3, 1, None]
    assert table["error_type"].to_pylist() == ["", "", "missing_column_value"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "give either prompt or columns.messages"),
        ({"columns": {"messages": "m"}}, "give either prompt or columns.messages"),
        ({"prompt": None, "columns": {"messages": "m", "prompts": "p"}}, "a conversation is asked once"),
        ({"columns": {"nope": "m"}}, "columns.nope: is not a known key"),
    ],
)
def test_columns_that_do_not_go_together_are_refused(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(CaptionJobConfig, {**fake_job().resolved(), **changes}, "job.yaml")


def test_several_prompts_need_their_placeholder_in_the_template() -> None:
    with pytest.raises(ConfigError, match=r"^columns\.prompts: no template contains \{prompt\}"):
        PromptOptions(PromptConfig(text="x"), RowColumnsConfig(prompts="p")).fields()


def test_columns_that_are_not_in_the_source_are_refused_by_their_dotted_path(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"^columns\.seed: the column 's' is not in"):
        read_all(jsonl(tmp_path, [{"a": 1}]), PromptOptions(PromptConfig(text="x"), RowColumnsConfig(seed="s")))
