"""A least-recently-used cache of values by content, with a limit in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from models.inputs.content import Content

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values of `max_bytes` together at most, the arrays of their keys counted. One thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes >= 0, max_bytes
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._held: OrderedDict[Content, tuple[Value, int]] = OrderedDict()

    def get(self, key: Content) -> Value | None:
        """The value of a key that is held, used from now on; None for another."""
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        return held[0]

    def keep(self, key: Content, value: Value, num_bytes: int) -> None:
        """Hold a new key's value of `num_bytes`, as far as there is room for it; the key's arrays are copied."""
        assert key not in self._held
        total = key.num_bytes + num_bytes
        if total > self.max_bytes:
            return
        self._held[key.copy()] = value, total
        self.num_bytes += total
        while self.num_bytes > self.max_bytes:
            _, (_, freed) = self._held.popitem(last=False)
            self.num_bytes -= freed
