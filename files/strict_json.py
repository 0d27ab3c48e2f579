"""Parse JSON that strangers wrote: bounded values and depth, no key twice, no number that JSON lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

MAX_VALUES = 1_000_000
MAX_DEPTH = 64
_MARKS = (b",", b"[", b"{")
_DIGITS = re.compile(r"limit \((\d+) digits\)")


class JsonError(ValueError):
    """Raised for text that is not strict JSON; the message is a part of a sentence, such as "it is nested too deep"."""


def parse_json(data: bytes, max_values: int = MAX_VALUES) -> Any:
    """Parse UTF-8 JSON. Raises JsonError for other text, more than `max_values` values, more than `MAX_DEPTH` levels, a
    key twice in one object, NaN, infinities, and numbers of thousands of digits."""
    expect_values(data, max_values)
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except UnicodeDecodeError:
        raise JsonError("it is not UTF-8") from None
    except JsonError:
        raise
    except RecursionError:
        raise JsonError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"it is not valid JSON: {error}") from None
    except ValueError as error:
        limit = _DIGITS.search(str(error))
        raise JsonError(f"it has a number of more than {limit[1]} digits" if limit else str(error)) from None
    if _is_deeper(value, MAX_DEPTH):
        raise JsonError(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def parse_object(data: bytes, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parse UTF-8 JSON as `parse_json`; JsonError unless it is an object."""
    value = parse_json(data, max_values)
    if not isinstance(value, dict):
        raise JsonError("it is no JSON object")
    return value


def expect_values(data: bytes, max_values: int) -> None:
    """Raise JsonError if JSON text may have more than `max_values` values, without parsing it."""
    # Each value but the first follows one of these marks; marks inside of strings make the count larger.
    if sum(data.count(mark) for mark in _MARKS) > max_values:
        raise JsonError(f"it has more than {max_values:,} values")


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield every object in parsed JSON with its path; the objects may be changed while walking."""
    if isinstance(value, dict):
        yield path, value
        children: Iterable[tuple[Any, Any]] = list(value.items())
    else:
        children = enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        if isinstance(child, (dict, list)):
            yield from walk(child, (*path, str(key)))


def _is_deeper(value: Any, max_depth: int) -> bool:
    """Return whether lists and objects are nested more than `max_depth` levels deep."""
    level = [value]
    for _ in range(max_depth):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys: set[str] = set()
        repeated = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"it has the key {repeated[:100]!r} twice in one object")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"it has the value {name}, which JSON does not have")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise JsonError(f"it has the number {text[:40]}, which is beyond the range of floats")
    return value
