"""Processors in decoding tasks: outputs equal the front end's, rows keep their errors, blocks keep their bound."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.media import Media, RowMedia
from configs.schema import PromptConfig, RowColumnsConfig
from configs.source import SourceColumnsConfig, SourceConfig
from models.inputs.output_size import Growth, OutputSizes
from models.inputs.processing import FrontEnd, PromptError
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from pipeline.media import image_decoding, prompt_processor
from pipeline.media.image_decoding import DecodeOptions, decode_table
from pipeline.media.prompt_processor import PromptProcessor
from pipeline.media.row_weights import Weigher
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.shards import encode, read_all, write_parquet

ROOT = Path(__file__).resolve().parents[3]
TARGET = ROOT / "zoo/checkpoints/caption_target"
SHARE = 8 << 20


@pytest.fixture(scope="module")
def front_end() -> FrontEnd:
    """The shipped captioning target's, whose chat template refuses a conversation with REFUSE."""
    ref = CheckpointRef(str(TARGET))
    processor = read_processor(ref, read_config(ref))
    refusal = "{% if 'REFUSE' in messages | string %}{{ raise_exception('not this word') }}{% endif %}"
    processor.chat_template = refusal + processor.chat_template
    return FrontEnd(processor)


def processor_of(front_end: FrontEnd, **options: Any) -> PromptProcessor:
    named = {"keeps_pixels": False, "share_bytes": SHARE, "batch_rows": 8, "max_call_s": 60.0, "num_threads": 1}
    named |= {"sizes": OutputSizes.measure(front_end, 336), **options}
    return PromptProcessor(fetch=lambda: front_end.processor, key=str(id(front_end)), **named)


def source_of(folder: Path, columns: dict[str, Any]) -> SourceConfig:
    folder.mkdir(exist_ok=True)
    write_parquet(folder / "x.parquet", columns)
    return SourceConfig(kind="parquet", path=str(folder), columns=SourceColumnsConfig(image="image"), id_column="id")


def tables(
    folder: Path, columns: dict[str, Any], processor: PromptProcessor, prompt_options: PromptOptions
) -> tuple[pa.Table, pa.Table]:
    """The decoded table with pixels, and the one with processor outputs."""
    source = source_of(folder, columns)
    rows = read_all(source, prompt_options)
    options = DecodeOptions.of(source, str(folder), prompt_options)
    return decode_table(rows, options), decode_table(rows, replace(options, processor=processor))


def check_outputs(row: RowMedia, front_end: FrontEnd, messages: str, pixels: RowMedia) -> None:
    """Compare a row's outputs with the front end's for its pixels, bit for bit."""
    prompt = front_end.render(json.loads(messages))
    expected = front_end.encode(prompt, pixels.images, pixels.videos)
    assert row.inputs is not None
    assert row.prompt == prompt
    inputs = row.inputs.unpack()
    assert inputs.keys() == expected.keys()
    for name, value in expected.items():
        assert inputs[name].dtype == value.dtype
        assert torch.equal(inputs[name], value), name
    assert (row.inputs.num_images, row.inputs.num_frames) == (len(pixels.images), ())


COLUMNS = {
    "id": ["a", "b", "c", "d", "e", "f"],
    "image": [encode("red"), encode("blue", (4, 2)), [encode("red"), encode("green", (40, 30))], b"junk", None, None],
    "ask": [["one?", "REFUSE", "two?"], ["REFUSE", "three?", "four?"], ["five?"], ["x", "y"], ["no picture"], None],
}


@pytest.mark.parametrize("keeps_pixels", [False, True])
def test_outputs_and_errors_of_several_prompts_per_sample(
    front_end: FrontEnd, tmp_path: Path, keeps_pixels: bool
) -> None:
    columns = {
        **COLUMNS,
        "image": pa.array([cell if isinstance(cell, list) else [cell] if cell else [] for cell in COLUMNS["image"]]),
    }
    prompt_options = PromptOptions(PromptConfig(text="Q: {prompt}"), RowColumnsConfig(prompts="ask"))
    processor = processor_of(front_end, keeps_pixels=keeps_pixels)
    plain, packed = tables(tmp_path / "in", columns, processor, prompt_options)
    same = [
        name for name in plain.column_names if name not in ("images", "packed_inputs", "error_type", "error_message")
    ]
    assert packed.select(same).equals(plain.select(same))
    media, pixels = Media(packed), Media(plain)
    shared: dict[tuple[Any, ...], Any] = {}
    for index, row in enumerate(
        plain.select(["sample_id", "source", "row_index", "messages", "error_type"]).to_pylist()
    ):
        error = packed["error_type"][index].as_py()
        if "REFUSE" in row["messages"]:
            # The message of the actor, which renders the same conversation in jobs without processing tasks.
            with pytest.raises(PromptError) as raised:
                front_end.render(json.loads(row["messages"]))
            message = f"the target's chat template refuses this conversation: {raised.value}"
            assert (error, packed["error_message"][index].as_py()) == ("prompt_refused", message)
            assert not packed["packed_inputs"][index].is_valid
            continue
        assert error == row["error_type"]
        if error:
            continue
        sample_media = media.of(index)
        check_outputs(sample_media, front_end, row["messages"], pixels.of(index))
        assert sample_media.inputs is not None
        assert [image.tobytes() for image in sample_media.images] == [
            image.tobytes() for image in (pixels.of(index).images if keeps_pixels else ())
        ]
        if sample_media.images or sample_media.inputs.num_images:
            values = sample_media.inputs.tensors["pixel_values"]
            assert shared.setdefault((row["source"], row["row_index"]), values) is values
    data = [
        tensor["data"]
        for cell in packed["packed_inputs"].to_pylist()
        if cell
        for tensor in cell["tensors"]
        if tensor["name"] == "pixel_values"
    ]
    assert [entry is not None for entry in data] == [True, False, True, False, True]


def test_outputs_are_copies_that_keep_no_block_alive(front_end: FrontEnd, tmp_path: Path) -> None:
    columns = {"id": ["a", "b"], "image": [encode("red"), encode("blue")]}
    _, packed = tables(tmp_path / "in", columns, processor_of(front_end), PromptOptions(PromptConfig(text="What?")))
    row = Media(packed).of(0)
    assert row.inputs is not None
    for tensor in row.inputs.tensors.values():
        for array in tensor.arrays:
            assert array.flags.owndata or array.base.flags.owndata
            assert array.flags.writeable, "a view of Arrow's memory is read-only"


def test_a_sample_with_too_large_processor_outputs_is_sent_as_pixels(front_end: FrontEnd, tmp_path: Path) -> None:
    columns = {"id": ["a"], "image": [encode("red")]}
    options = PromptOptions(PromptConfig(text="What?"))
    for limit in ({"share_bytes": 64}, {"sizes": OutputSizes(), "batch_rows": SHARE // 200}):
        plain, packed = tables(tmp_path / "in", columns, processor_of(front_end, **limit), options)
        assert packed.equals(plain)
    _, packed = tables(tmp_path / "in", columns, processor_of(front_end, batch_rows=SHARE // 200), options)
    assert packed["packed_inputs"].null_count == 0, "the estimate allows it"


def test_the_bytes_of_a_block_are_bounded_by_its_weights(front_end: FrontEnd, tmp_path: Path) -> None:
    """Rows of the weight of one task hold at most two shares, whatever their pictures' sizes."""
    sizes = OutputSizes.measure(front_end, None)
    generator = np.random.default_rng(0)
    names = [str(number) for number in range(24)]
    shapes = [tuple(int(side) for side in generator.integers(4, 400, 2)) for _ in names]
    source = source_of(tmp_path / "in", {"id": names, "image": [encode("red", shape) for shape in shapes]})
    source = source.model_copy(update={"max_side_px": None, "max_decoded_bytes": 6 << 20})
    prompt_options = PromptOptions(PromptConfig(text="What?"))
    rows = read_all(source, prompt_options)
    for keeps_pixels in (False, True):
        weigher = Weigher.of(source, 8, prompt_options, sizes, keeps_pixels)
        processor = processor_of(front_end, share_bytes=1 << 20, sizes=sizes, keeps_pixels=keeps_pixels)
        options = replace(DecodeOptions.of(source, source.path, prompt_options), processor=processor)
        start = num_processed = 0
        weights = weigher.weights(rows)
        while start < len(weights):
            stop = start + 1
            while stop < len(weights) and sum(weights[start : stop + 1]) <= 8:
                stop += 1
            block = decode_table(rows.slice(start, stop - start), options)
            assert block.nbytes <= 2 << 20
            num_processed += block.num_rows - block["packed_inputs"].null_count
            start = stop
        assert num_processed > 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 10**8)), min_size=1, max_size=8))
def test_no_measured_point_exceeds_the_bound_on_growth(points: list[tuple[int, int]]) -> None:
    growth = Growth.over(points)
    for decoded, num_bytes in points:
        assert growth.of([decoded]) >= num_bytes - 1


@pytest.mark.slow
def test_a_processor_that_hangs_ends_its_process() -> None:
    program = """
import time
from models.inputs.output_size import OutputSizes
from pipeline.media import prompt_processor
from pipeline.media.prompt_processor import PromptProcessor

class Hangs:
    def render(self, messages):
        time.sleep(600)

prompt_processor._front_ends["x"] = Hangs()
made = PromptProcessor(lambda: b"", "x", False, OutputSizes(), 1 << 20, 8, 0.2, 1)
made.process([[]], [], [])
print("survived")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "survived" not in done.stdout
    assert "Timeout" in done.stderr


def test_a_process_loads_its_front_end_once(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_processor, "_front_ends", {})
    fetched = []

    def fetch() -> Any:
        fetched.append(1)
        return front_end.processor

    processor = replace(processor_of(front_end), fetch=fetch)
    message = [{"role": "user", "content": [{"type": "text", "text": "w"}]}]
    for _ in range(3):
        assert processor.process([message], [], []) is not None
    assert len(fetched) == 1


def test_tables_without_a_processor_have_no_outputs(tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", {"id": ["a"], "image": [encode("red")]})
    prompt_options = PromptOptions(PromptConfig(text="What?"))
    made = image_decoding.decode_table(read_all(source, prompt_options), DecodeOptions.of(source, "", prompt_options))
    assert made["packed_inputs"].null_count == 1
