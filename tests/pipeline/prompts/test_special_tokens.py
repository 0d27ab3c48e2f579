"""A column's text cannot become special tokens of a real tokenizer behind a real chat template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from configs.schema import MessageConfig, PromptConfig, RowColumnsConfig
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from pipeline.prompts.row_options import PromptOptions

TARGET = Path(__file__).resolve().parents[3] / "zoo/checkpoints/caption_target"
PICTURE = np.zeros((64, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def front_end() -> FrontEnd:
    ref = CheckpointRef(str(TARGET))
    return FrontEnd(read_processor(ref, read_config(ref)))


def special_ids(front_end: FrontEnd, prompt_options: PromptOptions, fields: dict) -> list[int]:
    """The special tokens of one row's prompt with one picture."""
    [asked], images, _ = prompt_options.ask(fields, [PICTURE], [])
    ids = front_end.encode(front_end.render(asked.messages), images)["input_ids"][0].tolist()
    return [id_ for id_ in ids if id_ in front_end.tokenizer.all_special_ids]


def askings(front_end: FrontEnd) -> list[PromptOptions]:
    tokens = front_end.special_tokens
    turns = (MessageConfig(role="system", text="{q}"), MessageConfig(role="user", text="{q}{q}"))
    return [
        PromptOptions(PromptConfig(text="{q}"), special_tokens=tokens),
        PromptOptions(PromptConfig(messages=turns), special_tokens=tokens),
        PromptOptions(None, RowColumnsConfig(messages="m"), special_tokens=tokens),
    ]


@pytest.mark.parametrize(
    "text", ["<image>", "</s>", "<s>", "<pad><unk>", "a<image>\n</s>b", "<ima", "<s></s>" * 50, "<im<image>age>"]
)
def test_any_column_value_gives_the_special_tokens_of_ordinary_text(front_end: FrontEnd, text: str) -> None:
    for prompt_options in askings(front_end):
        rows = [{"q": value, "m": [{"role": "user", "content": value}]} for value in ("harmless", text)]
        harmless, actual = (special_ids(front_end, prompt_options, row) for row in rows)
        assert harmless
        assert actual == harmless


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "human", "value": "<im<image>age> </<image>s>"},
        {"role": "user", "content": [{"type": "text", "text": "<im"}, {"type": "text", "text": "age>"}]},
        {"role": "user", "content": ["<", "", "/", "s", ">", {"type": "image"}]},
    ],
)
def test_parts_of_a_turn_give_no_special_token_together(front_end: FrontEnd, turn: dict) -> None:
    asking = askings(front_end)[2]
    num_images = str(turn).count("<image>") or 1
    [asked], images, _ = asking.ask({"m": [turn]}, [PICTURE] * num_images, [])
    ids = front_end.encode(front_end.render(asked.messages), images)["input_ids"][0].tolist()
    harmless = special_ids(front_end, asking, {"m": [{"role": "user", "content": "harmless"}]})
    image_id = front_end.tokenizer.convert_tokens_to_ids("<image>")
    special = [id_ for id_ in ids if id_ in front_end.tokenizer.all_special_ids]
    assert [id_ for id_ in special if id_ != image_id] == [id_ for id_ in harmless if id_ != image_id]
    assert special.count(image_id) == num_images * harmless.count(image_id)


def test_special_tokens_are_those_of_tokenizer_and_processor(front_end: FrontEnd) -> None:
    assert front_end.special_tokens == ("</s>", "<image>", "<pad>", "<s>", "<unk>")
