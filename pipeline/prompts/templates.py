"""Parses prompt templates and fills them with a row's values. `{column}` is replaced by the row's value, looked up
literally, `{{` and `}}` by braces. Special tokens in column values are split, so that they stay plain text."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from configs.load import ConfigError
from configs.schema import MessageConfig, PromptConfig
from models.inputs.chat_template import ANSWER_PREFIX
from pipeline.rows.schemas import RowError

_TOKENS = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


def turns(prompt: PromptConfig) -> tuple[MessageConfig, ...]:
    """Return the prompt as messages; `prompt.text` becomes one user turn."""
    return prompt.messages if prompt.text is None else (MessageConfig(role="user", text=prompt.text),)


def _dotted(prompt: PromptConfig, index: int) -> str:
    return "prompt.text" if prompt.text is not None else f"prompt.messages.{index}.text"


@lru_cache(maxsize=64)
def _parse(template: str, where: str) -> tuple[tuple[str, bool], ...]:
    """Split a template into pieces (text, whether it is a column name); ConfigError for a lone brace."""
    pieces: list[tuple[str, bool]] = []
    position = 0
    for match in _TOKENS.finditer(template):
        pieces.append((template[position : match.start()], False))
        position = match.end()
        token = match.group(0)
        if token in ("{", "}"):
            at = match.start() + 1
            raise ConfigError(f"{where}: a single {token!r} at character {at}; write {token * 2!r} for a brace")
        pieces.append((match.group(1), True) if match.group(1) is not None else (token[0], False))
    pieces.append((template[position:], False))
    return tuple(piece for piece in pieces if piece[0])


def placeholders(prompt: PromptConfig) -> dict[str, str]:
    """Return the columns in the prompt in order, each with the dotted path of the turn that first names it."""
    names: dict[str, str] = {}
    for index, turn in enumerate(turns(prompt)):
        where = _dotted(prompt, index)
        for name in names_in(turn.text, where):
            names.setdefault(name, where)
    return names


def names_in(template: str, where: str) -> list[str]:
    """Return the columns in one template; `where` is its dotted path for a ConfigError about a lone brace."""
    return [text for text, is_name in _parse(template, where) if is_name]


def image_turn(prompt: PromptConfig) -> int:
    """Return the index of the turn for images: the turn with `images: true`, or the first user turn without `false`;
    ConfigError if two turns have `images: true`, or no turn may have images."""
    marked = [index for index, turn in enumerate(turns(prompt)) if turn.images]
    if len(marked) > 1:
        raise ConfigError(f"prompt.messages.{marked[1]}.images: turn {marked[0]} already carries the row's images")
    free = [index for index, turn in enumerate(turns(prompt)) if turn.role == "user" and turn.images is None]
    if marked or free:
        return [*marked, *free][0]
    raise ConfigError("prompt.messages: every user turn says images: false, so the row's images would reach no model")


def check(prompt: PromptConfig) -> None:
    """Raise the ConfigError of `placeholders` or `image_turn` for a prompt that no row can fill."""
    placeholders(prompt)
    image_turn(prompt)


def whole_text(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded as UTF-8, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def filled(template: str, where: str, fields: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Fill a template with a row's values, as JSON unless they are strings; return it and each value's (start, end)."""
    text = ""
    values: list[tuple[int, int]] = []
    for piece, is_name in _parse(template, where):
        if is_name:
            value = fields.get(piece)
            if value is None or (isinstance(value, float) and math.isnan(value)):
                message = f"the prompt names the column {piece!r}, which has no value in this row"
                raise RowError("missing_column_value", message)
            piece = whole_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            values.append((len(text), len(text) + len(piece)))
        text += piece
    return text, values


def neutralise(text: str, special_tokens: Sequence[str], values: Sequence[tuple[int, int]] | None = None) -> str:
    """Insert a space after the first character of special tokens, so that they become plain text. `values` are the
    (start, end) of column values, by default the whole text; tokens outside of them are kept. RowError `invalid_value`
    for a special token of one character, which cannot be split."""
    if not special_tokens:
        return text
    pattern = _any_of(tuple(special_tokens))
    parts: list[str] = []
    position = 0
    while (match := pattern.search(text, position)) is not None:
        start, end = match.span()
        parts.append(text[position : start + 1])
        if values is None or any(low < end and start < high for low, high in values):
            if end - start == 1:
                raise RowError("invalid_value", f"a column's text holds the special token {match.group()!r}")
            parts.append(" ")
        position = start + 1
    return "".join([*parts, text[position:]])


def neutralise_parts(texts: Sequence[str], special_tokens: Sequence[str]) -> list[str]:
    """Return the texts of a message's parts after `neutralise`, with a space at the beginning of a part before which a
    special token would continue that begins in an earlier part; chat templates may join them."""
    parts = [neutralise(text, special_tokens) for text in texts]
    if len(parts) < 2 or not special_tokens:
        return parts
    pattern, joined = _any_of(tuple(special_tokens)), "".join(parts)
    borders = list(accumulate(map(len, parts[:-1])))
    continued: set[int] = set()
    position = 0
    while (match := pattern.search(joined, position)) is not None:
        position = match.start() + 1
        continued.add(bisect_right(borders, match.start()) + 1)
    return [" " * (index in continued) + part for index, part in enumerate(parts)]


@lru_cache(maxsize=8)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(set(texts), key=len, reverse=True) if text))


def fill(
    prompt: PromptConfig,
    fields: Mapping[str, Any],
    num_images: int,
    num_videos: int = 0,
    special_tokens: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Build one row's chat messages; images, then videos, come before the text of their turn. The last turn is
    the prefix of the answer, if the prompt has one (`models.inputs.processing.FrontEnd.render`)."""
    carrier = image_turn(prompt)
    messages: list[dict[str, Any]] = []
    is_blank: list[bool] = []
    for index, turn in enumerate(turns(prompt)):
        text, values = filled(turn.text, _dotted(prompt, index), fields)
        if turn.role == "user" and values:
            is_blank.append(not text.strip())
        media = [{"type": "image"}] * num_images + [{"type": "video"}] * num_videos if index == carrier else []
        part = {"type": "text", "text": neutralise(text, special_tokens, values)}
        messages.append({"role": turn.role, "content": [*media, part]})
    if is_blank and all(is_blank):
        raise RowError("missing_column_value", "the prompt is blank, because the columns that it names are")
    if prompt.answer_prefix is not None:
        messages.append({"role": ANSWER_PREFIX, "content": [{"type": "text", "text": prompt.answer_prefix}]})
    return messages
