"""Prompt rows: templates filled, conditions and sampling values taken out of columns, every fault in its own row."""

from __future__ import annotations

import io
import json
import math
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.source import SourceConfig
from configs.synthesis import ImageColumnsConfig, ImagePromptConfig, ImageSamplingConfig
from pipeline.formats.kind import Needs
from pipeline.manifest.datasource import read_first
from pipeline.manifest.freezing import freeze_for
from pipeline.prompts.sampling import read_sampling
from pipeline.rows import schemas
from pipeline.rows.schemas import ERROR_CODES, RowError
from pipeline.synthesis.conditions import check_features_type, read_features, read_label
from pipeline.synthesis.prompts import MAX_PROMPT_CHARS, ConditionShape, PrepareOptions, prepare_table

WIDTH, MAX_TOKENS = 3, 4
TEXT = ConditionShape("text", width=WIDTH, max_tokens=MAX_TOKENS)
NUMBERS = np.arange(6, dtype=np.float32).reshape(2, WIDTH) / 4


def options(prompt: str | None = "{caption}", condition: ConditionShape = TEXT, **columns: Any) -> PrepareOptions:
    text = ImagePromptConfig(text=prompt) if prompt is not None else None
    return PrepareOptions(text, ImageColumnsConfig(**columns), ImageSamplingConfig(), 7, condition)


def table(fields: list[dict[str, Any]], errors: list[str] | None = None, **columns: pa.Array) -> pa.Table:
    """A READ table; further columns are kept ones."""
    count = len(fields)
    errors = errors or [""] * count
    keep = [pa.field(name, values.type) for name, values in columns.items()]
    own = [
        pa.array([f"s{index}" for index in range(count)]),
        pa.array(["shard"] * count),
        pa.array(range(count), pa.int64()),
        pa.array([[]] * count, schemas.ENCODED_IMAGES),
        pa.array([[]] * count, schemas.ENCODED_VIDEOS),
        pa.array([json.dumps(row) for row in fields]),
        pa.array(errors),
        pa.array([f"about {error}" if error else "" for error in errors]),
    ]
    return pa.table([*own, *columns.values()], schema=schemas.read_schema(keep))


def prepare(given: pa.Table, how: PrepareOptions) -> list[dict[str, Any]]:
    prepared = prepare_table(given, how)
    assert prepared.num_rows == given.num_rows
    rows = prepared.to_pylist()
    assert {row["error_type"] for row in rows} <= {"", *ERROR_CODES}
    return rows


# --- prompts -------------------------------------------------------------------------------------------------------


def test_a_template_is_filled_and_everything_else_is_the_jobs() -> None:
    [row] = prepare(table([{"caption": "a cat"}]), options("A photo of {caption}."))
    assert row == {
        "sample_id": "s0",
        "source": "shard",
        "row_index": 0,
        "prompt": "A photo of a cat.",
        "label": None,
        "features": None,
        "seed": 7,
        "temperature": 1.0,
        "top_k": 1000,
        "top_p": 1.0,
        "guidance_scale": 7.5,
        "error_type": "",
        "error_message": "",
    }


def test_prompts_that_no_image_can_be_made_from_are_rows_with_codes() -> None:
    captions: list[Any] = ["fine", "", " \n\t", None, "x" * (MAX_PROMPT_CHARS + 1)]
    prepared_rows = prepare(table([{"caption": caption} for caption in captions]), options())
    assert [row["error_type"] for row in prepared_rows] == [
        "", "empty_prompt", "empty_prompt", "missing_column_value", "prompt_too_long"
    ]  # fmt: skip
    assert [row["prompt"][:5] for row in prepared_rows] == ["fine", "", " \n\t", "", "xxxxx"]


def test_a_row_that_arrives_with_an_error_keeps_it() -> None:
    [bad, good] = prepare(table([{}, {"caption": "ok"}], ["broken_line", ""]), options())
    assert (bad["error_type"], bad["error_message"], bad["prompt"]) == ("broken_line", "about broken_line", "")
    assert (good["error_type"], good["prompt"]) == ("", "ok")


def test_kept_columns_are_passed_on_and_a_features_column_only_if_it_is_kept() -> None:
    given = table([{}], mine=pa.array([5], pa.int8()), t5=pa.array([NUMBERS.ravel().tolist()]))
    how = options(None, features="t5")
    prepared = prepare_table(given, replace(how, keep=("mine",)))
    assert prepared.schema.field("mine").type == pa.int8()
    assert prepared["mine"].to_pylist() == [5]
    assert "t5" not in prepared.schema.names
    assert np.frombuffer(prepared["features"][0].as_py()["values"], "<f4").tolist() == NUMBERS.ravel().tolist()
    assert prepare_table(given, replace(how, keep=("t5",)))["t5"].to_pylist() == [NUMBERS.ravel().tolist()]


def test_a_features_column_may_have_the_name_of_our_own() -> None:
    [row] = prepare(table([{}], features=pa.array([NUMBERS.ravel().tolist()])), options(None, features="features"))
    assert row["features"]["num_tokens"] == 2


def test_a_prompt_with_ready_features_is_only_recorded_and_may_be_missing() -> None:
    given = table([{"caption": "told"}, {"caption": None}], t5=pa.array([NUMBERS.ravel().tolist()] * 2))
    prepared_rows = prepare(given, options("{caption}", features="t5"))
    assert [(row["prompt"], row["error_type"]) for row in prepared_rows] == [("told", ""), ("", "")]


# --- features ------------------------------------------------------------------------------------------------------


def arrays() -> dict[str, tuple[pa.Array, str]]:
    """The same features in every form that a column may have, with the type of its bytes."""
    flat, nested = NUMBERS.ravel().tolist(), NUMBERS.tolist()
    bfloat16 = torch.from_numpy(NUMBERS).bfloat16().view(torch.uint16).numpy().astype("<u2").tobytes()
    tensor_type = pa.fixed_shape_tensor(pa.float32(), NUMBERS.shape)
    tensor = pa.ExtensionArray.from_storage(tensor_type, pa.array([flat], tensor_type.storage_type))
    return {
        "flat list": (pa.array([flat], pa.list_(pa.float32())), "float32"),
        "large list of doubles": (pa.array([flat], pa.large_list(pa.float64())), "float32"),
        "half floats": (pa.array([np.float16(flat)], pa.list_(pa.float16())), "float32"),
        "one list per token": (pa.array([nested], pa.list_(pa.list_(pa.float32()))), "float32"),
        "tokens of fixed size": (pa.array([nested], pa.list_(pa.list_(pa.float32(), WIDTH))), "float32"),
        "all of fixed size": (pa.array([nested], pa.list_(pa.list_(pa.float32(), WIDTH), 2)), "float32"),
        "tensor": (tensor, "float32"),
        "bytes": (pa.array([NUMBERS.tobytes()]), "float32"),
        "bytes of half floats": (pa.array([NUMBERS.astype("<f2").tobytes()], pa.large_binary()), "float16"),
        "bytes of bfloat16": (pa.array([bfloat16]), "bfloat16"),
        "JSON": (pa.array([json.dumps(nested)]), "float32"),
        "flat JSON": (pa.array([json.dumps(flat)]), "float32"),
    }


@pytest.mark.parametrize("form", arrays())
def test_features_are_the_same_numbers_in_whatever_form_they_come(form: str) -> None:
    values, dtype = arrays()[form]
    check_features_type(values.type, "t5")
    doubled = pa.concat_arrays([values, values])
    for cell in (values[0], doubled[1]):
        features = read_features(cell, dtype, WIDTH, MAX_TOKENS)
        assert features.dtype == np.float32
        assert features.tolist() == NUMBERS.tolist()


def test_padding_of_a_column_of_fixed_shape_is_cut_on_either_side() -> None:
    flat = NUMBERS.ravel().tolist()
    for padded in ([*flat, *[0.0] * 12], [*[0.0] * 12, *flat], [*[0.0] * 3, *flat, *[-0.0] * 3]):
        assert read_features(pa.array([padded])[0], "float32", WIDTH, MAX_TOKENS).tolist() == NUMBERS.tolist()


WRONG = {
    "null": (pa.array([None], pa.list_(pa.float32())), "no features"),
    "no token": (pa.array([[]], pa.list_(pa.float32())), "0 features, one per token; the model takes 1 to 4"),
    "too many tokens": (pa.array([[0.5] * 15]), "5 features, one per token"),
    "another width": (pa.array([[[0.5] * 4]]), "tokens of [4] numbers, not 3"),
    "another fixed width": (pa.array([[[0.5] * 4] * 3], pa.list_(pa.list_(pa.float32(), 4))), "tokens of [4] numbers"),
    "ragged tokens": (pa.array([[[0.5] * 3, [0.5] * 2]]), "tokens of [2, 3] numbers"),
    "no whole token": (pa.array([[0.5] * 7]), "7 numbers are no features of width 3"),
    "not a number": (pa.array([[0.5, math.nan, 1.0]]), "not finite"),
    "too large for float32": (pa.array([[0.5, 1e300, 1.0]], pa.list_(pa.float64())), "not finite"),
    "too small for float32": (
        pa.array([[1.0] * 3 + [1e-300] * 3], pa.list_(pa.float64())),
        "1 of the features' 2 rows",
    ),
    "a null among them": (pa.array([[0.5, None, 1.0]], pa.list_(pa.float32())), "some of them are null"),
    "a null token": (pa.array([[[0.5] * 3, None]], pa.list_(pa.list_(pa.float32()))), "some tokens are null"),
    "torn bytes": (pa.array([b"12345"]), "no numbers: buffer size"),
    "empty bytes": (pa.array([b""]), "0 features, one per token"),
    "no JSON": (pa.array(["{"]), "no numbers"),
    "JSON of words": (pa.array(['["a", "b", "c"]']), "no numbers: values of type"),
    "ragged JSON": (pa.array(["[[1, 2, 3], [1, 2]]"]), "no numbers"),
    "a JSON number": (pa.array(["3.5"]), "features of shape ()"),
    "JSON of three axes": (pa.array(["[[[1, 2, 3]], [[1, 2, 3]]]"]), "features of shape (2, 1, 3)"),
    "JSON booleans": (pa.array(["[true, false, true]"]), "values of type bool"),
    "JSON with NaN": (pa.array(["[NaN, 1, 2]"]), "not finite"),
    "zeros alone": (pa.array([[0.0] * 6]), "0 features, one per token"),
    "zeros in the middle": (pa.array([[1.0] * 3 + [0.0] * 3 + [1.0] * 3]), "1 of the features' 3 rows are zeros"),
}


@pytest.mark.parametrize("case", WRONG)
def test_features_that_fit_no_target_are_the_rows_error(case: str) -> None:
    values, words = WRONG[case]
    with pytest.raises(RowError) as refused:
        read_features(values[0], "float32", WIDTH, MAX_TOKENS)
    assert refused.value.code == "invalid_condition"
    assert words in refused.value.message


@pytest.mark.parametrize("kind", [pa.int64(), pa.list_(pa.int32()), pa.list_(pa.string()), pa.float32()])
def test_a_features_column_of_a_type_that_holds_none_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match=r"columns\.features: 't5' is .*; features are lists of floats"):
        check_features_type(kind, "t5")


# --- labels and sampling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "label"), [(0, 0), (9, 9), ("3", 3), (4.0, 4), (" 5 ", 5)])
def test_a_label_is_a_whole_number_in_whatever_form(value: Any, label: int) -> None:
    assert read_label(value, 10) == label


@pytest.mark.parametrize("value", [None, -1, 10, True, 1.5, "cat", "", math.nan, [1], {"a": 1}, 1e300, "1" * 5000])
def test_a_label_that_the_target_has_no_class_for_is_the_rows_error(value: Any) -> None:
    with pytest.raises(RowError) as refused:
        read_label(value, 10)
    assert refused.value.code == "invalid_condition"


ALL_COLUMNS = ImageColumnsConfig(seed="s", temperature="t", top_k="k", top_p="p", guidance_scale="g")


def test_a_rows_own_values_win_and_missing_ones_are_the_jobs() -> None:
    fields = {"s": 2**63 - 1, "t": 0, "k": "50", "p": "0.5", "g": None}
    sampling = read_sampling(fields, ALL_COLUMNS, ImageSamplingConfig(guidance_scale=3.0), 7)
    assert sampling == {"seed": 2**63 - 1, "temperature": 0.0, "top_k": 50, "top_p": 0.5, "guidance_scale": 3.0}
    assert read_sampling({}, ALL_COLUMNS, ImageSamplingConfig(), 7)["seed"] == 7


BAD_VALUES: list[tuple[str, Any]] = [
    ("s", -1), ("s", 2**63), ("s", 1.5), ("s", "x"), ("s", True), ("s", math.nan), ("s", [1]),
    ("t", -0.1), ("t", 101), ("t", math.nan), ("t", math.inf), ("t", "warm"), ("t", True), ("t", {}),
    ("k", -1), ("k", 2.5), ("k", "many"), ("k", 2**31), ("k", "9" * 30),
    ("p", 0), ("p", 1.01), ("p", math.nan), ("g", -1), ("g", 1e9), ("g", "NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("column", "value"), BAD_VALUES)
def test_a_rows_own_value_out_of_range_is_its_error_and_names_the_field(column: str, value: Any) -> None:
    names = {"s": "seed", "t": "temperature", "k": "top_k", "p": "top_p", "g": "guidance_scale"}
    with pytest.raises(RowError) as refused:
        read_sampling({column: value}, ALL_COLUMNS, ImageSamplingConfig(), 7)
    assert refused.value.code == "invalid_sampling"
    assert refused.value.message.startswith(f"{names[column]}: ")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


# The speed of drawing examples depends on the machine's load and not on the code.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("caption", "s", "t", "k", "p", "g", "l"), ANYTHING)))
def test_every_row_becomes_exactly_one_row(fields: dict[str, Any]) -> None:
    columns = ALL_COLUMNS.model_dump(exclude_none=True)
    for how in (
        options("{caption}", **columns),
        options("{caption}", ConditionShape("class", num_classes=3), **{**columns, "label": "l"}),
    ):
        [row] = prepare(table([fields]), how)
        if not row["error_type"]:
            assert 0 <= row["seed"] < 2**63
            assert 0 < row["top_p"] <= 1
            assert row["prompt"].strip() or row["label"] in (0, 1, 2)


# --- lines of JSON -------------------------------------------------------------------------------------------------


def test_half_of_a_surrogate_pair_anywhere_in_a_line_is_a_replacement_character_or_the_rows_error(
    tmp_path: Path,
) -> None:
    torn = "\ud800"
    lines: list[dict[str, Any]] = [
        {"id": f"a{torn}", "caption": f"a {torn} cat", "mine": torn},
        {"id": "b", "caption": {torn: [torn]}},
        {"id": "c", "caption": "c", "heat": torn},
        {"id": "d", "caption": "d", "seed": torn},
        {"id": "e", "caption": "\ud83d\ude00"},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    source = SourceConfig(kind="jsonl", path=str(tmp_path), id_column="id")
    wanted = {"caption": "prompt.text", "heat": "columns.temperature", "seed": "columns.seed"}
    frozen = freeze_for(Needs(source, wanted, ("mine",), with_images=False))
    read = read_first(source, frozen, tuple(wanted), 10, with_images=False)
    how = replace(options(temperature="heat", seed="seed"), keep=("mine",))
    outcomes = [(row["sample_id"], row["prompt"], row["error_type"]) for row in prepare(read, how)]
    assert outcomes == [
        ("a\ufffd", "a \ufffd cat", ""),
        ("b", '{"\ufffd": ["\ufffd"]}', ""),
        ("c", "c", "invalid_sampling"),
        ("d", "d", "invalid_sampling"),
        ("e", "\U0001f600", ""),
    ]
    prepared = prepare_table(read, how)
    assert prepared["mine"].to_pylist() == ["\ufffd", None, None, None, None]
    prepared.validate(full=True)


# --- tars of captions ----------------------------------------------------------------------------------------------


def test_captions_in_tars_are_read_with_and_without_images_beside_them(tmp_path: Path) -> None:
    members = {
        "a.txt": b"a cat", "a.json": b'{"seed": 4}', "b.jpg": b"unread", "b.txt": b"a dog", "c.jpg": b"no words"
    }  # fmt: skip
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    source = SourceConfig(kind="webdataset", path=str(tmp_path), max_image_bytes=1)
    frozen = freeze_for(Needs(source, {"txt": "prompt.text", "seed": "columns.seed"}))
    read = read_first(source, frozen, ("txt", "seed"), 10, with_images=False)
    prepared_rows = prepare(read, options("{txt}", seed="seed"))
    assert [(row["sample_id"], row["prompt"], row["seed"], row["error_type"]) for row in prepared_rows] == [
        ("s.tar#0", "a cat", 4, ""),
        ("s.tar#1", "a dog", 7, ""),
        ("s.tar#2", "", None, "missing_column_value"),
    ]
    # A job that is about images still wants them.
    codes = read_first(source, frozen, ("txt", "seed"), 10)["error_type"].to_pylist()
    assert codes == ["missing_image", "image_too_large", "image_too_large"]
