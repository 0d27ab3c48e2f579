"""Mutations of files: damage of transfers and storage, and wrong numbers in headers."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable

Mutation = Callable[[bytearray, random.Random], bytearray]
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
WORDS = (b"999999999999999999999", b"-1", b"0", b"1e999", b"NaN", b"null", b"\xff\xfe", b'"', b"{", b"[" * 40, b"\0")
MAX_RUN_BYTES = 64


def _at(data: bytearray, chance: random.Random, size: int = 1) -> int:
    """A position with `size` bytes behind it; half of all are in the first 512 bytes, where headers are."""
    end = max(0, len(data) - size)
    return chance.randint(0, min(end, 512) if chance.random() < 0.5 else end)


def _run(data: bytearray, chance: random.Random) -> slice:
    start = _at(data, chance)
    return slice(start, start + chance.randint(1, MAX_RUN_BYTES))


def flip(data: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.randint(1, 8)):
        if data:
            data[_at(data, chance)] ^= 1 << chance.randrange(8)
    return data


def truncate(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randint(0, len(data))]


def delete(data: bytearray, chance: random.Random) -> bytearray:
    del data[_run(data, chance)]
    return data


def repeat(data: bytearray, chance: random.Random) -> bytearray:
    run = _run(data, chance)
    return data[: run.stop] + data[run] * chance.randint(1, 4) + data[run.stop :]


def insert(data: bytearray, chance: random.Random) -> bytearray:
    at = _at(data, chance)
    return data[:at] + chance.randbytes(chance.randint(1, MAX_RUN_BYTES)) + data[at:]


def blank(data: bytearray, chance: random.Random) -> bytearray:
    run = _run(data, chance)
    data[run] = chance.choice((b"\0", b"\xff")) * len(data[run])
    return data


def swap(data: bytearray, chance: random.Random) -> bytearray:
    first, second = sorted((_at(data, chance, MAX_RUN_BYTES), _at(data, chance, MAX_RUN_BYTES)))
    size = min(MAX_RUN_BYTES, second - first)
    data[first : first + size], data[second : second + size] = data[second : second + size], data[first : first + size]
    return data


def number(data: bytearray, chance: random.Random) -> bytearray:
    size = chance.choice((1, 2, 4, 8))
    at = _at(data, chance, size)
    if at + size <= len(data):
        value = chance.choice(NUMBERS) % (1 << 8 * size)
        data[at : at + size] = struct.pack(chance.choice("<>") + {1: "B", 2: "H", 4: "I", 8: "Q"}[size], value)
    return data


def word(data: bytearray, chance: random.Random) -> bytearray:
    """Replace a number of a text, or insert a word."""
    digits = list(re.finditer(rb"\d+", data[:4096]))
    if digits and chance.random() < 0.5:
        start, stop = chance.choice(digits).span()
    else:
        start = stop = _at(data, chance)
    return data[:start] + chance.choice(WORDS) + data[stop:]


MUTATIONS: tuple[Mutation, ...] = (flip, truncate, delete, repeat, insert, blank, swap, number, number, word)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One to four mutations, one after another."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        changed = chance.choice(MUTATIONS)(changed, chance)
    return bytes(changed)
