"""Orders the shards of a job by the time at which they finished, so that ids can be compared between them.

An attempt whose rows are all published takes the next turn: it creates `_job/turns/NNNNNN.json`, which is never
replaced. The rank of a row is the first turn of its shard in the row's attempt or a later one. Of rows with equal ids,
the one with the smallest rank keeps the id; within a rank, the first in the source. A row sees all rows of smaller
ranks: they were published before their turn, and a turn exists before the next number is taken. So each shard changes
its own rows only, and needs no other driver.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.manifest.done_bitmap import Bools, Ints
from pipeline.storage.damage import DamagedFile
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import MAX_SHARDS

TURNS = "_job/turns"
UNRANKED = -1
"""The rank of a row whose shard has not taken a turn since it was made."""


@dataclass(frozen=True)
class Turns:
    """The turns up to that of one attempt, as pairs of shard and attempt."""

    taken: tuple[tuple[int, int], ...]

    @property
    def shards(self) -> tuple[int, ...]:
        return tuple(sorted({shard for shard, _ in self.taken}))

    def has(self, shard: int, ranks: Ints) -> Bools:
        """Return for each rank whether it is a turn of this shard."""
        owners = np.array([owner for owner, _ in self.taken], np.int64)
        return np.asarray(owners[ranks] == shard)

    def ranks(self, shard: int | None, attempts: Ints) -> Ints:
        """Return the rank of each row of a shard, by the attempts that made them."""
        turns = [(attempt, turn) for turn, (owner, attempt) in enumerate(self.taken) if owner == shard]
        made_until = np.maximum.accumulate(np.array([attempt for attempt, _ in turns], np.int64))
        numbers = np.array([*(turn for _, turn in turns), UNRANKED], np.int64)
        return np.asarray(numbers[np.searchsorted(made_until, attempts)])


def take_turn(output: OutputDir, attempt: int) -> Turns:
    """Take the next turn for an attempt of the shard of `output`, and return it after the earlier ones; DamagedFile if
    one of these is damaged or missing."""
    turn = (output.shard.number, attempt)
    taken = [_read(output, number) for number in range(len(output.list_files(TURNS)))]
    while True:  # ends, because every other attempt takes one turn
        try:
            output.create_recorded(_name(len(taken)), json.dumps(turn).encode())
        except FileExistsError:
            taken.append(_read(output, len(taken)))
            continue
        return Turns((*taken, turn))


def problem_of_turn(turn: Any) -> str:
    """Return why a value is no turn; empty if it is one."""
    is_turn = isinstance(turn, list) and [*map(type, turn)] == [int, int]
    return "" if is_turn and 0 <= turn[0] < MAX_SHARDS and turn[1] > 0 else "it is no pair of a shard and an attempt"


def _read(output: OutputDir, number: int) -> tuple[int, int]:
    relative = _name(number)
    advice = f"write into it the shard and the attempt that ended as number {number + 1}, such as [0, 1]"
    try:
        turn = output.read_json(relative, advice)
    except FileNotFoundError:
        raise DamagedFile(output.shown(relative), relative, "it is missing", advice) from None
    if problem := problem_of_turn(turn):
        raise DamagedFile(output.shown(relative), relative, problem, advice)
    shard, attempt = turn
    return shard, attempt


def _name(number: int) -> str:
    return f"{TURNS}/{number:06d}.json"
