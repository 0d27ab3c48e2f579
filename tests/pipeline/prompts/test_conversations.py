"""Conversations of a row's own: both ways of writing them, places of media, and what is no conversation."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.prompts.conversations import MEDIA, Conversation, place_media, read_conversation
from pipeline.rows.schemas import RowError


def text(value: str) -> dict:
    return {"type": "text", "text": value}


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


@pytest.mark.parametrize(
    ("value", "messages", "images"),
    [
        ([{"role": "user", "content": "hi"}], [("user", [text("hi")])], []),
        ('[{"role": "user", "content": "hi"}]', [("user", [text("hi")])], []),
        (
            [
                {"role": "system", "content": "s"},
                {"role": "USER", "content": [IMAGE, text("a"), {"type": "image", "image": "b.png"}, "c"]},
                {"role": "assistant", "content": [text("d")]},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/e.png"}}]},
            ],
            [
                ("system", [text("s")]),
                ("user", [IMAGE, text("a"), IMAGE, text("c")]),
                ("assistant", [text("d")]),
                ("user", [IMAGE]),
            ],
            [None, "b.png", "https://x/e.png"],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a", "image": None}, {"type": "image", "text": None}],
                }
            ],
            [("user", [text("a"), IMAGE])],
            [None],
        ),
        (
            [
                {"from": "human", "value": "<image>\nWhat?\n<image>"},
                {"from": "gpt", "value": "This."},
                {"from": "human", "value": "<video>And <image> this"},
            ],
            [
                ("user", [IMAGE, text("What?"), IMAGE]),
                ("assistant", [text("This.")]),
                ("user", [VIDEO, text("And "), IMAGE, text(" this")]),
            ],
            [None, None, None],
        ),
        ([{"role": "user", "content": "an <image> here"}], [("user", [text("an <image> here")])], []),
        ([{"role": "user", "content": "\ud800"}], [("user", [text("\ufffd")])], []),
    ],
)
def test_both_ways_of_writing_become_chat_messages(value, messages, images) -> None:
    parsed = read_conversation(value, "m")
    assert [(message["role"], message["content"]) for message in parsed.messages] == messages
    assert parsed.uris["image"] == images


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "missing_column_value"),
        ([], "missing_column_value"),
        ("null", "missing_column_value"),
        ("{", "invalid_value"),
        ("[" * 100_000, "invalid_value"),
        (7, "invalid_value"),
        ({"role": "user", "content": "x"}, "invalid_value"),
        (["x"], "invalid_value"),
        ([{"role": "tool", "content": "x"}], "invalid_value"),
        ([{"content": "x"}], "invalid_value"),
        ([{"role": "user"}], "invalid_value"),
        ([{"role": "user", "content": 7}], "invalid_value"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "invalid_value"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_value"),
        ([{"role": "user", "content": [{"type": "image", "image": 7}]}], "invalid_value"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "invalid_value"),
        ([{"role": "user", "content": "x"}] * 1001, "invalid_value"),
    ],
)
def test_invalid_conversations_are_row_errors(value, code) -> None:
    with pytest.raises(RowError, match="'m'") as caught:
        read_conversation(value, "m")
    assert caught.value.code == code


def conversation(*parts: dict) -> Conversation:
    return read_conversation([{"role": "user", "content": list(parts)}], "m")


def test_placeholders_take_the_media_of_the_row_in_order_and_uris_keep_their_position() -> None:
    parsed = conversation(IMAGE, {"type": "image", "url": "b"}, IMAGE)
    assert place_media(parsed, "image", ["one", "two"], "m") == ["one", "b", "two"]


def test_media_without_placeholders_precede_the_text_of_the_first_user_turn() -> None:
    parsed = read_conversation([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "m")
    assert place_media(parsed, "image", ["one", "two"], "m") == ["one", "two"]
    assert place_media(parsed, "video", ["film"], "m") == ["film"]
    assert [part["type"] for part in parsed.messages[1]["content"]] == ["image", "image", "video", "text"]


@pytest.mark.parametrize("given", [[], ["one"], ["one", "two", "three"]])
def test_more_or_fewer_media_than_placeholders_is_a_row_error(given) -> None:
    with pytest.raises(RowError, match="2 places for images") as caught:
        place_media(conversation(IMAGE, IMAGE), "image", given, "m")
    assert caught.value.code == "invalid_value"


@given(st.lists(st.sampled_from(["<image>", "<video>", "a", "\n", "<", "image>"]), max_size=12).map("".join))
def test_media_marks_become_placeholders_and_other_text_is_unchanged(value) -> None:
    parsed = read_conversation([{"from": "human", "value": value}], "m")
    for kind in MEDIA:
        assert len(parsed.uris[kind]) == value.count(f"<{kind}>")
    texts = "".join(part.get("text", "") for part in parsed.messages[0]["content"])
    assert texts.replace("\n", "") == value.replace("<image>", "").replace("<video>", "").replace("\n", "")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["role", "content", "from", "value", "type", "text", "image", "url"]), inner, max_size=4
            )
        ),
    )
)
def test_every_row_becomes_a_conversation_or_a_row_error(value) -> None:
    for written in (value, json.dumps(value)):
        try:
            parsed = read_conversation(written, "m")
        except RowError:
            continue
        assert parsed.messages[-1]["role"] == "user"
