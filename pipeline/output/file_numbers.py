"""Assigns the numbers of published files of one folder to tasks that publish at the same time."""

from __future__ import annotations

import heapq
import threading


class FileNumbers:
    """File numbers from `first` on, thread-safe.

    A number is assigned only if it is less than the smallest number without a file plus `window`, which lets a later
    attempt fence this one out (`pipeline.output.publishing`).
    """

    def __init__(self, first: int, window: int) -> None:
        self._window = window
        self._next = first
        self._returned: list[int] = []
        self._assigned: set[int] = set()
        self._changed = threading.Condition()

    @property
    def smallest_free(self) -> int:
        """The smallest number that has no file and is not assigned."""
        with self._changed:
            return self._smallest_free()

    def take(self) -> int:
        """Assign the smallest free number; wait until it is within the window."""
        with self._changed:
            self._changed.wait_for(self._is_within_window)
            number = self._smallest_free()
            if self._returned:
                heapq.heappop(self._returned)
            else:
                self._next += 1
            self._assigned.add(number)
            return number

    def end(self, number: int, published: int | None) -> None:
        """Record that the task with this number has `published` a file, whose number is at least `number`; None returns
        the number without a file."""
        with self._changed:
            self._assigned.remove(number)
            if published is None:
                heapq.heappush(self._returned, number)
            else:
                # All numbers between the two have files.
                self._next = max(self._next, published + 1)
            self._changed.notify_all()

    def _is_within_window(self) -> bool:
        free = self._smallest_free()
        return free < min([free, *self._assigned]) + self._window

    def _smallest_free(self) -> int:
        return self._returned[0] if self._returned else self._next
