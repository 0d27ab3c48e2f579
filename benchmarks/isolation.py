"""The cost of decoding in a separate process without the store's credentials: images and Parquet.

    python -m benchmarks.isolation    # a minute; writes results/isolation.json

Both ways decode the same bytes in turns. Images use the decoding process of jobs. For Parquet, which jobs decode in the
process that opens the store, the child reads ranges of the file through a pipe and returns Arrow's stream format.
"""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.decode import encode_jpeg, photograph
from benchmarks.harness.results import results_file, write_results
from pipeline.media.image_decoding import decode_image
from pipeline.media.video.sampling import Sampling
from pipeline.media.video.worker import NO_VIDEOS, DecoderWorker, Limits

RESULTS = results_file("isolation")
NUM_ROUNDS = 5
NUM_IMAGES = 200
NUM_ROWS, ROW_BYTES, ROWS_PER_GROUP = 1_000, 100_000, 100
MAX_PIXELS = 64_000_000
FRAME = struct.Struct("<cQQ")
"""A kind and two numbers: R for a range of the file, T for a table of so many bytes, E for the end."""
Way = Callable[[], Any]


def main() -> int:
    found = {"images": _rounds(*_images()), "parquet": _rounds(*_parquet())}
    for name, cell in found.items():
        print(
            f"{name:8} in process {cell['here_mb_per_s']:,.0f} MB/s, {cell['here_cpu_s']:.2f} s of CPU; in a child "
            f"{cell['child_mb_per_s']:,.0f} MB/s, {cell['child_cpu_s']:.2f} s of CPU; equal: {cell['equal']}"
        )
    write_results(RESULTS, {"num_rounds": NUM_ROUNDS, "cells": found})
    return 0


def _rounds(num_bytes: int, here: Way, child: Way, end: Callable[[], None]) -> dict[str, Any]:
    """Medians over rounds of both ways in turn, and whether their results are equal."""
    times: dict[str, list[tuple[float, float]]] = {"here": [], "child": []}
    equal = here() == child()  # also warms both
    for _ in range(NUM_ROUNDS):
        for name, way in (("here", here), ("child", child)):
            start_s, start_cpu_s = time.perf_counter(), _cpu_s()
            way()
            times[name].append((time.perf_counter() - start_s, _cpu_s() - start_cpu_s))
    end()
    cell: dict[str, Any] = {"num_bytes": num_bytes, "equal": equal}
    for name, pairs in times.items():
        cell[f"{name}_mb_per_s"] = round(num_bytes / 1e6 / median(wall for wall, _ in pairs), 1)
        cell[f"{name}_cpu_s"] = round(median(cpu for _, cpu in pairs), 3)
    return cell


def _cpu_s() -> float:
    """CPU seconds of this process and its children, including those that still run."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _images() -> tuple[int, Way, Way, Callable[[], None]]:
    files = [encode_jpeg(photograph(seed, 640, 480)) for seed in range(8)]
    worker = DecoderWorker(NO_VIDEOS, Sampling(num_frames=1), Limits())

    def child(data: bytes) -> int:
        taken: list[np.ndarray[Any, Any]] = []

        def take(num_bytes: int) -> memoryview:
            taken.append(np.empty(num_bytes, np.uint8))
            return taken[-1].data

        worker.decode_image(data, take, 1 << 30, "the limit")
        return int(taken[0].sum())

    some = [files[number % len(files)] for number in range(NUM_IMAGES)]
    return (
        sum(map(len, some)),
        lambda: [int(decode_image(data, MAX_PIXELS).sum()) for data in some],
        lambda: [child(data) for data in some],
        worker.close,
    )


def _parquet() -> tuple[int, Way, Way, Callable[[], None]]:
    generator = np.random.default_rng(0)
    folder = tempfile.TemporaryDirectory(prefix="draftfleet-")
    path = os.path.join(folder.name, "rows.parquet")
    rows = {"id": [str(row) for row in range(NUM_ROWS)], "image": [generator.bytes(ROW_BYTES) for _ in range(NUM_ROWS)]}
    pq.write_table(pa.table(rows), path, row_group_size=ROWS_PER_GROUP)
    reader = subprocess.Popen(
        [sys.executable, "-c", "from benchmarks.isolation import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[1],
        env={"PATH": os.environ.get("PATH", "")},
    )

    def here() -> int:
        with open(path, "rb") as file:
            parquet = pq.ParquetFile(file)
            return sum(parquet.read_row_group(group).num_rows for group in range(parquet.num_row_groups))

    def child() -> int:
        assert reader.stdin is not None
        assert reader.stdout is not None
        num_rows = 0
        with open(path, "rb") as file:
            reader.stdin.write(FRAME.pack(b"F", os.path.getsize(path), 0))
            reader.stdin.flush()
            while True:
                kind, first, second = FRAME.unpack(reader.stdout.read(FRAME.size))
                if kind == b"E":
                    return num_rows
                if kind == b"T":
                    num_rows += pa.ipc.open_stream(reader.stdout.read(first)).read_all().num_rows
                else:
                    file.seek(first)
                    reader.stdin.write(file.read(second))
                    reader.stdin.flush()

    def end() -> None:
        reader.communicate()  # ends its input, waits, and closes both pipes
        folder.cleanup()

    return os.path.getsize(path), here, child, end


class _Ranges(io.RawIOBase):
    """A file whose ranges are read by the other end of a pipe."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes, self._position = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, count: int | None = -1) -> bytes:
        left = self._num_bytes - self._position
        wanted = left if count is None or count < 0 else min(count, left)
        sys.stdout.buffer.write(FRAME.pack(b"R", self._position, wanted))
        sys.stdout.buffer.flush()
        data = sys.stdin.buffer.read(wanted)
        self._position += len(data)
        return data


def serve() -> None:
    """The child: decode one file after the other, until its input ends."""
    while head := sys.stdin.buffer.read(FRAME.size):
        parquet = pq.ParquetFile(_Ranges(FRAME.unpack(head)[1]))
        for group in range(parquet.num_row_groups):
            rows = parquet.read_row_group(group)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as stream:
                stream.write_table(rows)
            data = sink.getvalue()
            sys.stdout.buffer.write(FRAME.pack(b"T", data.size, 0))
            sys.stdout.buffer.write(data)
        sys.stdout.buffer.write(FRAME.pack(b"E", 0, 0))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
