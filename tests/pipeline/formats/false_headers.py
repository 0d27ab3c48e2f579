"""Builds small files whose headers claim more than the files hold, or which expand to much more than their size."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Pairs = Sequence[tuple[int, int]]
END = bytes(2 * tarfile.BLOCKSIZE)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % tarfile.BLOCKSIZE)


def number(value: int, size: int = 12) -> bytes:
    """A number in base 256, which may be negative."""
    return (value % 256 ** (size - 1) | (0xFF if value < 0 else 0x80) << 8 * (size - 1)).to_bytes(size, "big")


def header(name: str, size: int | bytes = 0, kind: bytes = b"0", **fields: bytes) -> bytes:
    """The header block of a member; `fields` set bytes at `at_<position>`."""
    block = bytearray(tarfile.BLOCKSIZE)
    block[: len(name)] = name.encode()
    block[100:124] = b"0000644\0" + b"0000000\0" * 2
    block[124:136] = size if isinstance(size, bytes) else number(size) if size >= 8**11 else b"%011o\0" % size
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    for position, value in fields.items():
        start = int(position.removeprefix("at_"))
        block[start : start + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, data: bytes) -> bytes:
    return header(name, len(data)) + padded(data)


def record(keyword: str, value: bytes) -> bytes:
    """One record of a pax header."""
    body = b" %s=%s\n" % (keyword.encode(), value)
    size = len(body)
    while len(b"%d" % size) + len(body) != size:
        size = len(b"%d" % size) + len(body)
    return b"%d" % size + body


def pax(records: dict[str, bytes] | bytes, kind: bytes = b"x") -> bytes:
    body = records if isinstance(records, bytes) else b"".join(record(*item) for item in records.items())
    return header("PaxHeaders/x", len(body), kind) + padded(body)


def sparse(form: str, name: str, size: int, pairs: Pairs, data: bytes) -> bytes:
    """A sparse member in one of GNU's formats `old`, `0.0`, `0.1` and `1.0`, whose content claims `size` bytes."""
    if form == "old":
        fields = b"".join(number(offset) + number(count) for offset, count in pairs)
        blocks = [fields[start : start + 504] for start in range(96, len(fields), 504)]
        more = b"".join(
            part.ljust(504, b"\0") + bytes([index < len(blocks) - 1]) + bytes(7) for index, part in enumerate(blocks)
        )
        fields_at = {
            "at_257": b"ustar  \0",
            "at_386": fields[:96],
            "at_482": bytes([bool(blocks)]),
            "at_483": number(size),
        }
        return header(name, len(data), b"S", **fields_at) + more + padded(data)
    records = {"GNU.sparse.name": name.encode()}
    if form == "1.0":
        lines = [len(pairs), *(value for pair in pairs for value in pair)]
        data = padded(b"".join(b"%d\n" % line for line in lines)) + data
        records |= {"GNU.sparse.major": b"1", "GNU.sparse.minor": b"0", "GNU.sparse.realsize": b"%d" % size}
        return pax(records) + header("GNUSparseFile.0/x", len(data)) + padded(data)
    records |= {"GNU.sparse.size": b"%d" % size, "GNU.sparse.numblocks": b"%d" % len(pairs)}
    if form == "0.1":
        records["GNU.sparse.map"] = b",".join(b"%d,%d" % pair for pair in pairs)
        return pax(records) + header("GNUSparseFile.0/x", len(data)) + padded(data)
    body = b"".join(record(*item) for item in records.items())
    for offset, count in pairs:
        body += record("GNU.sparse.offset", b"%d" % offset) + record("GNU.sparse.numbytes", b"%d" % count)
    return pax(body) + header(name, len(data)) + padded(data)


def repeated(values: Sequence[Any], rows: Sequence[int], kind: pa.DataType) -> pa.Array:
    """A dictionary array: the values at these rows."""
    return pa.DictionaryArray.from_arrays(pa.array(rows, pa.int32()), pa.array(values, kind))


def parquet_bytes(columns: dict[str, Any], **options: Any) -> bytes:
    """A Parquet file that is read without dictionary types."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, **{"compression": "zstd", "store_schema": False} | options)
    return sink.getvalue().to_pybytes()


def arrow_bytes(table: pa.Table, stream: bool = False, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def replaced(data: bytes, number_: int, by: int) -> bytes:
    """The bytes with one 64-bit number replaced wherever it occurs."""
    changed = data.replace(number_.to_bytes(8, "little"), by.to_bytes(8, "little"))
    assert changed != data, number_
    return changed


def nested_views(depth: int, width: int = 10) -> pa.Array:
    """Lists of `width` lists that are all the same one, `depth` levels deep."""
    values = pa.array(np.arange(width))
    for _ in range(depth):
        bounds = pa.array([0] * width, pa.int32()), pa.array([len(values)] * width, pa.int32())
        values = pa.ListViewArray.from_arrays(*bounds, values)
    return values
