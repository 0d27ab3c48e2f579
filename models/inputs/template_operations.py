"""What chat templates may call: operators, filters, tests and methods, each bounded before it runs.

An operation that is not listed here is refused, because one call of it could hang or take all memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from models.inputs.template_meter import CELL, METER, Meter, TemplateTooCostly

MAX_INT_BITS = 4096
MAX_WIDTH = 1000
"""Maximum number of characters to which one value is padded."""
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_WIDE = re.compile(r"\d{4,}|%[^a-zA-Z%]*\*")
_QUOTED = re.compile(r"%[^a-zA-Z%]*[ra]")
_TIME = re.compile(r"%[-_0^#:]*\d{3,}")
Check = Callable[[Meter, Any, tuple[Any, ...], dict[str, Any]], None]


# --- operators -----------------------------------------------------------------------------------------------------


def check_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Raise TemplateTooCostly if `left operator right` is too large or too slow."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        size = bits[0] * max(right, 0) if operator == "**" else sum(bits)
        if size > MAX_INT_BITS:
            raise TemplateTooCostly(f"it computes a number of more than {MAX_INT_BITS} bits")
    elif operator == "*":
        number, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(number, int):
            meter.expect(max(number, 0) * meter.size(value))
    elif operator == "+":
        meter.expect(_escaped(left, right) * (meter.size(left) + meter.size(right)))
    elif operator == "%" and isinstance(left, (str, bytes)):
        check_percent(meter, left, right)


def check_percent(meter: Meter, template: Any, values: Any) -> None:
    """Raise TemplateTooCostly if `template % values` may be too large; each conversion may take all values."""
    if _WIDE.search(str(template)):
        raise TemplateTooCostly(f"it pads a value to more than {MAX_WIDTH} characters")
    num_conversions = str(template).count("%")
    parts = list(values.values()) if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    sizes = [meter.text_size(part) for part in parts]
    # A mapping's values may be repeated.
    size = num_conversions * max(sizes, default=0) if isinstance(values, Mapping) else sum(sizes)
    factor = 10 if _QUOTED.search(str(template)) else _escaped(template, *parts)
    meter.expect(len(template) + num_conversions * MAX_WIDTH + factor * size)


def _escaped(*values: Any) -> int:
    """Return by how much operators may lengthen texts: text that is marked as safe escapes other text."""
    return 6 if any(isinstance(value, Markup) for value in values) else 1


# --- methods -------------------------------------------------------------------------------------------------------


def _nothing(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Accept an operation whose result is at most three times as large as its values."""


def _width(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for number in (*args, *kwargs.values()):
        if isinstance(number, int):
            meter.expect(number)


def _replace(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    old, new = (str(args[index]) if len(args) > index else str(kwargs.get(name, "")) for index, name in _OLD_NEW)
    meter.expect(len(str(value)) + (str(value).count(old) + 1) * len(new))


_OLD_NEW = ((0, "old"), (1, "new"))


def _join_method(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args and hasattr(args[0], "__len__"):
        meter.expect(meter.size(args[0]) + len(value) * len(args[0]))
    elif args:
        raise TemplateTooCostly("it joins values of unknown number")


def _lines(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    meter.expect(len(value) + CELL * sum(map(value.count, LINE_ENDS)))


def _split(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    separator = args[0] if args else kwargs.get("sep")
    limit = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
    if isinstance(separator, str) and separator:
        count = value.count(separator)
    else:
        most = meter.largest // CELL
        count = len(value) if len(value) < most else len(value.split(None, most))
    if isinstance(limit, int) and limit >= 0:
        count = min(count, limit)
    meter.expect(len(value) + CELL * count)


_LINEAR = dict.fromkeys(
    (
        *("strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower", "title", "capitalize", "swapcase"),
        *("casefold", "find", "rfind", "index", "rindex", "count", "removeprefix", "removesuffix", "partition"),
        *("rpartition", "isdigit", "isalpha", "isalnum", "isspace", "isnumeric", "isdecimal", "isupper", "islower"),
        *("istitle", "isidentifier", "isascii", "isprintable"),
    ),
    _nothing,
)
METHODS: Mapping[type, Mapping[str, Check]] = {
    str: {
        **_LINEAR,
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
        **dict.fromkeys(("split", "rsplit"), _split),
        **{"splitlines": _lines, "replace": _replace, "join": _join_method},
    },
    dict: dict.fromkeys(("get", "items", "keys", "values", "copy"), _nothing),
    list: dict.fromkeys(("index", "count", "copy"), _nothing),
    tuple: dict.fromkeys(("index", "count"), _nothing),
    type: {"fromkeys": _nothing},
}
"""Type → method → check of its arguments, which runs before it."""
BORROWING = frozenset(("get", "items", "keys", "values"))
"""Methods that return parts of their object, which are no new values."""


# --- filters and tests ---------------------------------------------------------------------------------------------


def _join_filter(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    separator = args[0] if args else kwargs.get("d", "")
    by_attribute = len(args) > 1 or "attribute" in kwargs
    items = list(value) if not isinstance(value, str) else value
    texts = 10 * meter.size(items) if by_attribute else sum(map(meter.text_size, items))
    meter.expect(texts + meter.text_size(separator) * len(items))


def _indent(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    width = args[0] if args else kwargs.get("width", 4)
    size = len(width) if isinstance(width, str) else int(width)
    meter.expect(len(str(value)) + size * (2 + sum(map(str(value).count, LINE_ENDS))))


def _rows(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for number in (*args[:1], kwargs.get("linecount"), kwargs.get("slices")):
        meter.expect(CELL * number if isinstance(number, int) else 0)


def _to_json(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    width = 0
    for option in (*args, *kwargs.values()):
        for part in option if isinstance(option, (tuple, list)) else (option,):
            number = len(part) if isinstance(part, str) else part if isinstance(part, int) else 0
            if number > CELL:
                raise TemplateTooCostly(f"it writes JSON with separators of more than {CELL} characters")
            width = max(width, number)
    # JSON may write six characters for one; the result is checked again.
    meter.expect(meter.size(value) * (1 + 4 * width))


def _format(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_percent(meter, str(value), kwargs or args)


def _digits(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for number in (*args, *kwargs.values()):
        if isinstance(number, int) and abs(number) > MAX_WIDTH:
            raise TemplateTooCostly(f"it rounds to more than {MAX_WIDTH} digits")


def _numbers(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    start = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if not isinstance(start, (int, float)):
        raise TemplateTooCostly("it sums up values that are no numbers")


def _whole(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count an operation that compares values with each other."""
    for operand in (value, *args):
        meter.step(meter.size(operand) // 64)


FILTERS: Mapping[str, Check] = {
    **dict.fromkeys(
        (
            *("abs", "attr", "capitalize", "count", "d", "default", "e", "escape", "first", "float", "items", "last"),
            *("length", "list", "lower", "map", "reject", "rejectattr", "reverse", "safe", "select", "selectattr"),
            *("string", "title", "trim", "truncate", "upper", "wordcount"),
        ),
        _nothing,
    ),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _whole),
    **dict.fromkeys(("batch", "slice"), _rows),
    **dict.fromkeys(("int", "round"), _digits),
    **{"center": _width, "format": _format, "indent": _indent, "join": _join_filter, "replace": _replace},
    **{"sum": _numbers, "tojson": _to_json},
}
"""Filter → check of its arguments, which runs before it."""
LAZY = frozenset(("map", "reject", "rejectattr", "select", "selectattr", "first", "default", "d"))
"""Filters that take their entries one by one, or none."""
CONSTANT = frozenset(("attr", "count", "d", "default", "first", "last", "length"))
"""Filters whose time does not depend on the number of entries."""
COMPARISONS = frozenset(
    ("in", "eq", "equalto", "==", "ne", "!=", "gt", "greaterthan", ">", "ge", ">=", "lt", "lessthan", "<", "le", "<=")
)


def check_filter(meter: Meter, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count a filter and check its arguments; returns the value for the filter, an iterator's entries as a list."""
    meter.step(1 if name in CONSTANT else meter.shallow(value))
    if name not in LAZY:
        value = meter.collected(value)
    if name == "string" or (name == "list" and isinstance(value, str)):
        meter.expect(CELL * len(value) if name == "list" else meter.text_size(value))
    FILTERS[name](meter, value, args, kwargs)
    return value


def check_method(meter: Meter, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count a call of a method of text, a list, a mapping or a tuple, and check its arguments; TemplateTooCostly for
    other methods."""
    owner = method.__self__
    kinds = (kind for kind in METHODS if isinstance(owner, kind))
    check = METHODS.get(next(kinds, object), {}).get(method.__name__)
    if check is None:
        raise TemplateTooCostly(
            f"it calls the method {method.__name__} of {type(owner).__name__}, which is not bounded"
        )
    meter.step(meter.shallow(owner))
    check(meter, owner, args, kwargs)


def format_time(strftime_now: Callable[[str], str]) -> Callable[[str], str]:
    """Return transformers' `strftime_now` for formats that do not pad: the C library fills any width."""

    def bounded(template: str) -> str:
        if len(template) > MAX_WIDTH or _TIME.search(template):
            raise TemplateTooCostly(f"it pads a date to more than {MAX_WIDTH} characters")
        return strftime_now(template)

    return bounded


def meter() -> Meter:
    """Return the meter of the rendering in this thread."""
    return METER.get()
