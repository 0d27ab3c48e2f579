"""Count what rendering a chat template costs: steps, and sizes of the values that it makes.

Every value that a template makes has at most `largest` units: one per character, `CELL` per entry of a list or mapping,
shared entries counted each time. So each operation on values is bounded, and the number of operations by steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

CELL = 16
"""Units of an entry of a list or mapping, besides those of its value."""
MAX_DEPTH = 64
"""Levels of nested lists and mappings."""
UNITS_PER_STEP = 1024
"""Units that one step may read or write."""
MAX_ADDED_UNITS = 1024**2
"""Units that a template may add to a conversation: its own text, repeated for each turn."""
MAX_STEPS = 5_000_000
_SMALL = 2**63
CONTAINERS: tuple[type[Iterable[Any]], ...] = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))


class TemplateTooCostly(Exception):
    """Raised if a template takes more steps, or makes larger values, than conversations of this size need."""


class Meter:
    """What one rendering may cost, for a conversation of `num_turns` turns with `num_units` units of text."""

    def __init__(self, num_turns: int, num_units: int) -> None:
        self.steps = min(50_000 + 2_000 * num_turns + 16 * num_turns**2, MAX_STEPS) + num_units // 64
        self.largest = MAX_ADDED_UNITS + 4 * num_units
        self.units = 16 * MAX_ADDED_UNITS + 32 * num_units

    def step(self, count: int = 1) -> None:
        """Take `count` steps."""
        self.steps -= count
        if self.steps < 0:
            raise TemplateTooCostly("it takes too many steps for a conversation of this length")

    def expect(self, num_units: float) -> None:
        """Refuse a value of `num_units` before it is made, if it would be too large."""
        if num_units > self.largest:
            raise TemplateTooCostly("it makes a text or list that is too large for a conversation of this length")

    def made(self, value: Any) -> Any:
        """Count a new value and return it."""
        size = self.size(value)
        self.units -= size
        self.step(1 + size // UNITS_PER_STEP)
        if self.units < 0:
            raise TemplateTooCostly("it makes too many texts and lists for a conversation of this length")
        return value

    def read(self, value: Any) -> Any:
        """Count an operation that reads a value completely, such as a comparison, and return the value."""
        self.step(1 + self.size(value) // UNITS_PER_STEP)
        return value

    def size(self, value: Any) -> int:
        """Return the units of a value, at most `largest`."""
        kind = type(value)
        if kind is str:
            size = len(value)
        elif value is None or kind is bool or kind is float or (kind is int and -_SMALL < value < _SMALL):
            return 1
        else:
            size = self._deep_size(value)
        self.expect(size)
        return size

    def _deep_size(self, value: Any) -> int:
        total = 0
        stack: list[Iterator[Any]] = [iter((value,))]
        while stack:
            for item in stack[-1]:
                total += CELL
                if isinstance(item, (str, bytes)):
                    total += len(item)
                elif isinstance(item, int):
                    total += item.bit_length() // 8
                elif (parts := _parts(item)) is not None:
                    stack.append(parts)
                    break
                self.expect(total)
            else:
                stack.pop()
            if len(stack) > MAX_DEPTH:
                raise TemplateTooCostly(f"it nests lists more than {MAX_DEPTH} levels deep")
        return total

    def text_size(self, value: Any) -> int:
        """Return an upper bound of the characters of `str(value)`."""
        return len(value) if isinstance(value, str) else 24 + 10 * self.size(value)

    def collected(self, value: Any) -> Any:
        """Return an iterator's entries as a list, and any other value as it is."""
        if not hasattr(value, "__next__"):
            return value
        most = self.largest // CELL
        entries = list(itertools.islice(value, most + 1))
        self.expect(len(entries) * CELL)
        return self.made(entries)

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the entries of an iterator, one step each."""
        for value in values:
            self.step()
            yield value

    def shallow(self, value: Any) -> int:
        """Return the steps of an operation that visits a value's entries once."""
        if isinstance(value, str):
            return 1 + len(value) // UNITS_PER_STEP
        return 1 + len(value) if isinstance(value, Sized) and not isinstance(value, Namespace) else 1


def _parts(value: Any) -> Iterator[Any] | None:
    """Return an iterator over the entries of a container, None for other values."""
    if isinstance(value, Mapping):
        return itertools.chain(value.keys(), value.values())
    if isinstance(value, CONTAINERS):
        return iter(value)
    if isinstance(value, Namespace):
        attributes: dict[str, Any] = object.__getattribute__(value, "_Namespace__attrs")
        return itertools.chain(attributes.keys(), attributes.values())
    return None


METER: ContextVar[Meter] = ContextVar("template_meter")
"""The meter of the rendering in this thread."""
