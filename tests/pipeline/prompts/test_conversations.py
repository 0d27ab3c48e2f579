"""Conversations of a row's own: both ways of writing them, places of media, and what is no conversation."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.prompts.conversations import (
    MEDIA,
    Conversation,
    place_media,
    read_conversation,
    read_marks,
    text_of_messages,
)
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
        ([{"role": "assistant", "content": "y"}], "invalid_value"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "invalid_value"),
        ([{"role": "user", "content": " "}], "missing_column_value"),
        ([{"role": "user", "content": "x"}] * 1001, "invalid_value"),
    ],
)
def test_invalid_conversations_are_row_errors(value, code) -> None:
    with pytest.raises(RowError, match="'m'") as caught:
        read_conversation(value, "m")
    assert caught.value.code == code


def test_the_answers_behind_the_last_question_are_left_out() -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    more = [*turns, {"from": "human", "value": "z"}, {"from": "gpt", "value": "<image>"}, {"from": "gpt", "value": "a"}]
    assert [message["role"] for message in read_conversation(turns, "m").messages] == ["user"]
    found = read_conversation(more, "m")
    assert [message["role"] for message in found.messages] == ["user", "assistant", "user"]
    assert found.uris["image"] == []
    with pytest.raises(RowError, match="does not end with a turn of the user"):
        read_conversation(turns, "m", drops_answers=False)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUI="}},
            "data:image/png;base64,QUI=",
        ),
        ({"type": "image", "source": {"type": "url", "url": "https://h/x"}}, "https://h/x"),
        ({"image": "file:///a.png"}, "file:///a.png"),
        ({"image_url": {"url": "b.png"}}, "b.png"),
        ({"type": "input_image", "image_url": "c.png"}, "c.png"),
    ],
)
def test_parts_of_other_interfaces_name_their_images(part, expected) -> None:
    turns = [
        {"role": "developer", "content": [{"type": "input_text", "text": "s"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"role": "user", "content": [part, {"text": "u"}]},
    ]
    found = read_conversation(turns, "m")
    assert found.uris["image"] == [expected]
    assert [message["role"] for message in found.messages] == ["system", "assistant", "user"]
    assert found.messages[2]["content"] == [{"type": "image"}, {"type": "text", "text": "u"}]


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
    turns = [{"from": "human", "value": value}]
    if not value.strip():
        with pytest.raises(RowError, match="blank"):
            read_conversation(turns, "m")
        return
    parsed = read_conversation(turns, "m")
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


@pytest.mark.parametrize(
    ("value", "num_images", "num_videos", "expected"),
    [
        ("<image>\nDescribe.", 0, 1, ([], ["film0"], "vt")),
        ("<image> and <image>", 0, 2, ([], ["film0", "film1"], "vtv")),
        ("<video>\nDescribe.", 0, 1, ([], ["film0"], "vt")),
        ("<image> <video>", 1, 1, (["one0"], ["film0"], "itv")),
        ("<image>", 1, 0, (["one0"], [], "i")),
    ],
)
def test_marks_of_images_are_places_for_the_videos_of_rows_without_images(
    value: str, num_images: int, num_videos: int, expected: tuple[list[str], list[str], str]
) -> None:
    parsed = read_conversation([{"from": "human", "value": value + "?"}], "m")
    read_marks(parsed, num_images, num_videos)
    images = place_media(parsed, "image", [f"one{number}" for number in range(num_images)], "m")
    videos = place_media(parsed, "video", [f"film{number}" for number in range(num_videos)], "m")
    kinds = "".join(part["type"][0] for part in parsed.messages[0]["content"])
    assert (images, videos, kinds.removesuffix("t")) == (*expected[:2], expected[2].removesuffix("t"))


def test_marks_of_images_stay_if_the_row_has_another_number_of_videos() -> None:
    parsed = read_conversation([{"from": "human", "value": "<image> and <image>?"}], "m")
    read_marks(parsed, 0, 1)
    with pytest.raises(RowError, match="has 2 places for images, and the row has 0"):
        place_media(parsed, "image", [], "m")


@pytest.mark.parametrize(
    ("content", "num_images", "num_videos", "kinds", "keeps_marks"),
    [
        ("<image>\nWhat?", 1, 0, "it", False),
        ("First <image>, then <image>", 2, 0, "titi", False),
        ([{"type": "text", "text": "<image>What?"}, {"type": "text", "text": "<video>"}], 1, 1, "itv", False),
        ("<image>\nWhat?", 0, 1, "vt", False),
        ("<image>\nWhat?", 2, 0, "iit", True),
        ("What is <image>?", 0, 0, "t", True),
        ([{"type": "image"}, "What is <image>?"], 1, 0, "it", True),
    ],
)
def test_marks_in_texts_are_places_if_there_are_as_many_as_media(
    content, num_images, num_videos, kinds, keeps_marks
) -> None:
    parsed = read_conversation([{"role": "user", "content": content}], "m")
    read_marks(parsed, num_images, num_videos)
    place_media(parsed, "image", ["i"] * num_images, "m")
    place_media(parsed, "video", ["v"] * num_videos, "m")
    parts = parsed.messages[0]["content"]
    assert "".join(part["type"][0] for part in parts) == kinds
    assert any("<image>" in part.get("text", "") for part in parts) == keeps_marks


def test_marks_in_texts_stay_text_by_the_older_rule() -> None:
    parsed = read_conversation([{"role": "user", "content": "<image>\nWhat?"}], "m")
    read_marks(parsed, 1, 0, in_texts=False)
    assert place_media(parsed, "image", ["i"], "m") == ["i"]
    assert parsed.messages[0]["content"] == [IMAGE, text("<image>\nWhat?")]


def test_the_text_of_the_users_turns_is_shown_without_media_and_other_roles() -> None:
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "And here?"},
    ]
    assert text_of_messages(json.dumps(turns)) == "What is it?\nAnd here?"
    assert text_of_messages("") == ""
    assert text_of_messages(json.dumps(turns), 4) == "What"
