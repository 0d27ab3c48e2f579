"""A program of its own: reads and decodes sources with one mutated file between two valid ones, as a job's tasks do.

    python -m tests.fuzz.reader FIRST STOP FOLDER

Writes a JSON line with `begun` before each file and one with its outcome after it, so that its parent knows the file
that ended this process. `FOLDER` has the mutated file of the last line.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import shutil
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from actors.media import without_fillers
from configs.load import ConfigError
from configs.schema import PromptConfig, RowColumnsConfig
from configs.source import SourceConfig
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.freezing import freeze
from pipeline.media import image_decoding
from pipeline.media.row_weights import Weigher
from pipeline.media.video.clips import worker_of
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows import schemas
from tests.fuzz import valid as valid_files
from tests.fuzz.mutations import mutated
from tests.fuzz.valid import Valid

MIB = 1 << 20
LIMITS: dict[str, Any] = {
    "max_image_pixels": 4_000_000,
    "max_side_px": 512,
    "max_decoded_bytes": 128 * MIB,
    "uri_schemes": ("file", "data"),
    "span_max_bytes": 16 * MIB,
    "video": {"num_frames": 4, "timeout_s": 20.0, "worker_max_bytes": 384 * MIB, "max_decoded_bytes": 64 * MIB},
}
READER_BYTES = (128 + 128 + 256) * MIB
"""Bound of the reading process: a span's rows (`MIN_SPAN_BYTES`), a decoding task, and a compressed block."""
DECODER_BYTES = LIMITS["video"]["worker_max_bytes"]
BATCH_ROWS = 16
MAX_MESSAGE_CHARS = 500


def peak_bytes(pid: int | str) -> int:
    """The largest resident size of a process since `forget_peak`; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peaks = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(peaks[0].split()[1]) if peaks else 0


def forget_peak(pid: int | str) -> int:
    """Set the peak of a process to its present size, and return that."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_bytes(pid)


def mutation_of(seed: int) -> tuple[Valid, bytes]:
    """The valid file of a seed, and its mutated form."""
    found = valid_files.files()
    valid, chance = found[seed % len(found)], random.Random(seed)
    if valid.inner is not None and chance.random() < 0.7:
        return valid, valid.seal(mutated(valid.inner(valid.data), chance))
    return valid, mutated(valid.data, chance)


def write(folder: Path, valid: Valid, data: bytes) -> SourceConfig:
    """Write the mutated file between two valid ones."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in valid.beside.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("a", valid.data), ("b", data), ("c", valid.data)):
        (folder / f"{name}.{valid.suffix}").write_bytes(content)
    return SourceConfig.model_validate(
        {"kind": valid.kind, "path": str(folder), "columns": {"image": valid.columns.get("image")}, **LIMITS}
    )


def rows_of(source: SourceConfig, valid: Valid) -> Iterator[dict[str, Any]]:
    """Read and decode all rows as the job's tasks do; yields their ids, codes, messages, sizes and digests."""
    messages = valid.columns.get("messages")
    prompts = PromptOptions(PromptConfig(text="What?"))
    if messages is not None:
        prompts = PromptOptions(None, RowColumnsConfig(messages=messages))
    frozen = freeze(source, prompts)
    options = image_decoding.DecodeOptions.of(source, frozen.root, prompts)
    weigher = Weigher.of(source, BATCH_ROWS, prompts)
    for task in SpanDatasource(source, frozen, tuple(prompts.fields())).get_read_tasks(1):
        [table] = task()
        table.validate(full=True)
        padded = weigher.with_fillers(table)
        for start in range(0, padded.num_rows, BATCH_ROWS):
            decoded = image_decoding.decode_table(without_fillers(padded.slice(start, BATCH_ROWS)), options)
            decoded.validate(full=True)
            for row in decoded.to_pylist():
                yield summary(row)


def summary(row: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(row["messages"].encode())
    sizes = []
    for medium in (*row["images"], *row["videos"]):
        digest.update(medium["rgb"])
        frames = medium.get("num_frames", 1)
        assert len(medium["rgb"]) == 3 * frames * medium["height"] * medium["width"] > 0
        sizes.append([frames, medium["height"], medium["width"]])
    kept = {name: row[name] for name in ("sample_id", "source", "row_index", "error_type", "error_message")}
    return kept | {"digest": digest.hexdigest(), "sizes": sizes}


@cache
def undisturbed(name: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of the two valid files beside a third one of the same kind."""
    [valid] = [one for one in valid_files.files() if one.name == name]
    rows = list(rows_of(write(folder, valid, valid.data), valid))
    assert all(row["error_type"] == "" for row in rows), (name, rows)
    return neighbours(rows)


def neighbours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["source"][0] in "ac"]


def faults_of(valid: Valid, size: int, rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """Properties that the rows of a source with a mutated file of `size` bytes do not have."""
    own = [row for row in rows if row["source"].startswith("b.")]
    faults = []
    if neighbours(rows) != expected:
        faults.append("the rows of other files have changed")
    elif len(own) + len(expected) != len(rows):
        faults.append("rows of unknown files")
    if len({row["sample_id"] for row in rows}) != len(rows):
        faults.append("two rows have one id")
    if len(own) > (1 if valid.is_one_row else max(1, size)) or (valid.is_one_row and not own):
        faults.append(f"a file of {size} bytes has {len(own)} rows")
    for row in own:
        if row["error_type"] and row["error_type"] not in schemas.ERROR_CODES:
            faults.append(f"unknown code {row['error_type']!r}")
        if bool(row["error_type"]) != bool(row["error_message"]) or len(row["error_message"]) > MAX_MESSAGE_CHARS:
            faults.append(f"a message of {len(row['error_message'])} characters for {row['error_type']!r}")
        if valid.is_one_row and not row["error_type"] and not row["sizes"]:
            faults.append("a row without pixels and without an error")
    return faults


def try_file(seed: int, folder: Path) -> dict[str, Any]:
    """Read one mutated file; its codes and peaks, and the faults that were found."""
    valid, data = mutation_of(seed)
    expected = undisturbed(valid.name, folder)
    source = write(folder, valid, data)
    media = image_decoding.DecodeOptions.of(source, str(folder), PromptOptions(PromptConfig(text="x"))).media
    worker = worker_of(media)
    child, before = worker.pid, forget_peak("self")
    child_before = forget_peak(child) if child else 0
    cpu_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    codes: list[str]
    faults: list[str]
    try:
        rows = list(rows_of(source, valid))
        codes = sorted({row["error_type"] or "read" for row in rows if row["source"].startswith("b.")})
        faults = faults_of(valid, len(data), rows, expected)
    except ConfigError as error:
        codes, faults = ["refused"], []
        if valid.is_one_row or f"b.{valid.suffix}" not in str(error):
            faults = [f"the source is refused: {error}"]
    peaks = {"reader_bytes": peak_bytes("self") - before, "decoder_bytes": 0}
    if child and worker.pid == child:
        peaks["decoder_bytes"] = peak_bytes(child) - child_before
    if peaks["reader_bytes"] > READER_BYTES or peaks["decoder_bytes"] > DECODER_BYTES:
        faults.append(f"memory beyond the bound: {peaks}")
    spent_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu_s
    return {"seed": seed, "name": valid.name, "codes": codes, "faults": faults, "cpu_s": round(spent_s, 2), **peaks}


def main() -> None:
    first, stop, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    pa.set_memory_pool(pa.system_memory_pool())
    for seed in range(first, stop):
        print(json.dumps({"begun": seed}), flush=True)
        try:
            outcome = try_file(seed, folder)
        except Exception:
            valid, _ = mutation_of(seed)
            outcome = {"seed": seed, "name": valid.name, "codes": [], "faults": [traceback.format_exc(limit=-4)]}
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
