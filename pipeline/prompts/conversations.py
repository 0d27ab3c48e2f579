"""Parses conversations in rows, in the formats below, to chat messages and placeholders for their media.

    [{"role": "user", "content": "text"}]
    [{"role": "user", "content": [{"type": "text", "text": …}, {"type": "image"}, {"type": "image", "url": …}]}]
    [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": …, "data": …}}]}]
    [{"role": "user", "content": [{"image": …}, {"text": …}]}]
    [{"from": "human", "value": "<image>\\nWhat is this?"}]

A placeholder without a URI takes the row's next image or video.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError

MAX_TURNS = 1000
MAX_TEXT_CHARS = 16 * 1024 * 1024
MEDIA = ("image", "video")
_MARKS = re.compile(r"<(image|video)>")
_ROLES = {
    **{name: name for name in ("system", "user", "assistant")},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
}


@dataclass(frozen=True)
class Conversation:
    """Messages with lists of text, image and video parts; `uris` has, by kind, a URI or None per placeholder."""

    messages: list[dict[str, Any]]
    uris: dict[str, list[str | None]]


def read_conversation(value: Any, column: str, drops_answers: bool = True) -> Conversation:
    """Parse one row's conversation; a string value is parsed as JSON. Assistant turns at its end are left out if
    `drops_answers`. RowError `missing_column_value`, or `invalid_value` unless it is a conversation that ends with a
    user turn."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _invalid(column, f"is no JSON: {error}") from None
    if value is None or value == []:
        raise RowError("missing_column_value", f"the column {column!r} has no conversation in this row")
    if not isinstance(value, list) or len(value) > MAX_TURNS:
        raise _invalid(column, f"is no list of up to {MAX_TURNS} turns")
    roles = [_role(turn, f"turn {number}", column) for number, turn in enumerate(value, start=1)]
    while drops_answers and roles and roles[-1] == "assistant":
        del roles[-1]
    if not roles or roles[-1] != "user":
        raise _invalid(column, "does not end with a turn of the user, which the model then answers")
    messages: list[dict[str, Any]] = []
    uris: dict[str, list[str | None]] = {kind: [] for kind in MEDIA}
    num_chars = 0
    for number, (turn, role) in enumerate(zip(value, roles, strict=False), start=1):
        parts = list(_parts(turn, f"turn {number}", column))
        for part, uri in parts:
            num_chars += len(part.get("text", ""))
            if part["type"] in MEDIA:
                uris[part["type"]].append(uri)
        messages.append({"role": role, "content": [part for part, _ in parts]})
    if num_chars > MAX_TEXT_CHARS:
        raise _invalid(column, f"has more than {MAX_TEXT_CHARS} characters")
    if all(part["type"] == "text" and not part["text"].strip() for part in messages[-1]["content"]):
        raise RowError("missing_column_value", f"the column {column!r} ends with a blank turn of the user")
    return Conversation(messages, uris)


def _role(turn: Any, where: str, column: str) -> str:
    if not isinstance(turn, Mapping):
        raise _invalid(column, f"has a {where} that is no object")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise _invalid(column, f"has the role {role!r:.50} in {where}; roles are {', '.join(_ROLES)}")
    return _ROLES[role.lower()]


def _parts(turn: Mapping[str, Any], where: str, column: str) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the parts of a turn's content, each with its URI or None."""
    content = turn.get("content")
    if content is None and isinstance(turn.get("value"), str):
        yield from _marked_parts(turn["value"])
        return
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            yield {"type": "text", "text": whole_text(part)}, None
            continue
        if not isinstance(part, Mapping):
            raise _invalid(column, f"has content in {where} that is neither text nor a list of parts")
        kind = str(part.get("type") or _kind_of(part)).removesuffix("_url").removeprefix("input_")
        kind = "text" if kind == "output_text" else kind
        if kind == "text" and isinstance(part.get("text"), str):
            yield {"type": "text", "text": whole_text(part["text"])}, None
        elif kind in MEDIA:
            yield {"type": kind}, _uri_of(part, kind, where, column)
        else:
            raise _invalid(column, f"has a part of type {part.get('type')!r:.50} in {where}")


def _kind_of(part: Mapping[str, Any]) -> str:
    """Return the kind of a part without a type, as of Qwen: the one of its keys that names a kind."""
    return next(
        (kind for kind in ("text", *MEDIA, *(f"{kind}_url" for kind in MEDIA)) if part.get(kind) is not None), ""
    )


def _uri_of(part: Mapping[str, Any], kind: str, where: str, column: str) -> str | None:
    for name in (kind, f"{kind}_url", "source", "url", "path", "uri"):
        found = part.get(name)
        if isinstance(found, Mapping) and found.get("type") == "base64" and isinstance(found.get("data"), str):
            found = f"data:{found.get('media_type') or ''};base64,{found['data']}"
        elif isinstance(found, Mapping):
            found = found.get("url")
        if isinstance(found, str) and found:
            return whole_text(found)
        if found is not None and found != "":
            raise _invalid(column, f"has a {kind} in {where} that is no URI")
    return None


def _marked_parts(text: str) -> Iterator[tuple[dict[str, Any], None]]:
    """Split text at the marks `<image>` and `<video>`; a newline between a mark and text is removed."""
    pieces = _MARKS.split(whole_text(text))
    for number, piece in enumerate(pieces):
        if number % 2:
            yield {"type": piece}, None
            continue
        piece = piece.removeprefix("\n") if number else piece
        piece = piece.removesuffix("\n") if number < len(pieces) - 1 else piece
        if piece:
            yield {"type": "text", "text": piece}, None


def read_marks(conversation: Conversation, num_images: int, num_videos: int, in_texts: bool = True) -> None:
    """Make marks the places of a row's media. `in_texts`: marks in texts, if the conversation has no places, and as
    many marks as the row has media. Places of images become those of videos, as in LLaVA-Video's rows, if the row has
    as many videos and neither an image nor a place for a video."""
    uris, messages = conversation.uris, conversation.messages
    if in_texts and not uris["image"] and not uris["video"] and num_images + num_videos:
        texts = [part["text"] for message in messages for part in message["content"]]
        marks = [mark for text in texts for mark in _MARKS.findall(text)]
        found = marks.count("image"), marks.count("video")
        if found == (num_images, num_videos) or (not num_images and found == (num_videos, 0)):
            uris |= {kind: [None] * count for kind, count in zip(MEDIA, found, strict=True)}
            for message in messages:
                parts = (part for text in message["content"] for part, _ in _marked_parts(text["text"]))
                message["content"] = list(parts)
    if num_images or uris["video"] or uris["image"] != [None] * num_videos:
        return
    uris["video"], uris["image"] = uris["image"], []
    for message in messages:
        message["content"] = [{"type": "video"} if part["type"] == "image" else part for part in message["content"]]


def place_media(conversation: Conversation, kind: str, given: Sequence[Any], column: str) -> list[Any]:
    """Return the media of a kind in placeholder order: the URI of each placeholder, or the next medium of `given`.
    Without placeholders, the media are inserted before the text of the first user turn. RowError `invalid_value` if
    there are more or fewer media than placeholders."""
    uris = conversation.uris[kind]
    if not uris and given:
        turn = next(message for message in conversation.messages if message["role"] == "user")
        num_before = sum(part["type"] in MEDIA for part in turn["content"])
        turn["content"][num_before:num_before] = [{"type": kind}] * len(given)
        return list(given)
    num_open = uris.count(None)
    if num_open != len(given):
        raise _invalid(column, f"has {num_open} places for {kind}s, and the row has {len(given)}")
    rest = iter(given)
    return [next(rest) if uri is None else uri for uri in uris]


def _invalid(column: str, what: str) -> RowError:
    return RowError("invalid_value", f"the column {column!r} {what}")


def text_of_messages(messages: str, max_chars: int = 2000) -> str:
    """Return the texts of the user's turns in the JSON list of chat turns of a decoded row, at most `max_chars` long;
    empty for a row without turns."""
    texts: list[str] = []
    for message in json.loads(messages) if messages else []:
        content = message.get("content")
        if message.get("role") != "user":
            continue
        parts = [{"text": content}] if isinstance(content, str) else content or []
        texts += [str(part["text"]) for part in parts if isinstance(part, dict) and part.get("text")]
    return "\n".join(texts)[:max_chars]
