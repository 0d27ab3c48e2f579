"""Reads inputs of known values as a job does, and counts those that are wrong without an error, lost, or right.

    python -m benchmarks.inputs FOLDER [--tree before]     # writes results/inputs.json

FOLDER has the sources and `manifest.json`, a list of cases with these keys:

    id, what        a name, and a description
    source          the section `source` of a job; local paths are relative to FOLDER
    prompt, columns the prompt's text and the section `columns`, or null
    expected        the rows in order; or {"refused": true} if the job must be refused; or {"ids": [...]}
    files_here      false if the files of this case are missing; it is left out

A row has any of `error` (a code or several), `id`, `text`, `parts` (the first letter of each content part's type),
`size` (width and height), `quadrants` (mean colours of the quarters of its first picture or frame) or `all_quadrants`
(of each picture), `tol` (of colours), `num_frames`, and `bars` (the grey value in the middle of each frame).

A case is `lost` if a valid row is missing or an error row, or the job is refused; `wrong` if a row has other values.
The column `before` is measured by this module in a checkout of an older commit, with `--results`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.results import command_line, progress, read_results, results_file, write_results
from configs.schema import PromptConfig, RowColumnsConfig
from configs.source import SourceConfig
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.freezing import freeze
from pipeline.media.image_decoding import DecodeOptions, decode_table
from pipeline.prompts.row_options import PromptOptions

RESULTS = results_file("inputs")
OUTCOMES = ("wrong", "lost", "right")
DEFAULT_TOLERANCE = 8
BAR_TOLERANCE = 4
MAX_REASON_CHARS = 200
Row = dict[str, Any]


def rows_of(case: dict[str, Any], folder: Path) -> list[Row]:
    """Plan, read and decode a case as a job does; raises what a job is refused with."""
    given = dict(case["source"])
    paths = given["path"] if isinstance(given["path"], list) else [given["path"]]
    given["path"] = [path if "://" in path else str(folder / path) for path in paths]
    given["local_roots"] = [str((folder / path).resolve()) for path in given.get("local_roots", ())]
    source = SourceConfig.model_validate_json(json.dumps(given))
    columns = RowColumnsConfig(**(case["columns"] or {}))
    prompt = None if columns.messages else PromptConfig(text=case["prompt"] or "What?")
    prompts = PromptOptions(prompt, columns)
    frozen = freeze(source, prompts)
    options = DecodeOptions.of(source, frozen.root, prompts)
    datasource = SpanDatasource(source, frozen, tuple(prompts.fields()), has_conversations=bool(columns.messages))
    tables = (datasource.read(span) for span in range(datasource.num_spans))
    return [row for table in tables for row in decode_table(table, options).to_pylist()]


def outcome_of(case: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Return one of `OUTCOMES` and the first difference of a case."""
    expected = case["expected"]
    must_be_refused = isinstance(expected, dict) and "refused" in expected
    try:
        rows = rows_of(case, folder)
    except Exception as error:
        return "right" if must_be_refused else "lost", f"refused: {error}"
    if must_be_refused:
        return "wrong", "not refused"
    if isinstance(expected, dict):
        ids = sorted(row["sample_id"] for row in rows if not row["error_type"])
        return ("right", "") if ids == sorted(expected["ids"]) else ("lost", f"ids {ids}")
    found = sorted(
        itertools.chain.from_iterable(faults_of(row, wanted) for row, wanted in zip(rows, expected)),
        key=lambda fault: OUTCOMES.index(fault[0]),
    )
    if len(rows) != len(expected):
        is_lost = len(rows) < len(expected) or any(row["error_type"] for row in rows)
        found.insert(0, ("lost" if is_lost else "wrong", f"{len(rows)} rows of {len(expected)}"))
    return found[0] if found else ("right", "")


def faults_of(row: Row, wanted: Row) -> Iterator[tuple[str, str]]:
    """Yield the outcome and a description of every difference of one row."""
    codes = wanted.get("error")
    if codes is not None:
        if row["error_type"] not in ([codes] if isinstance(codes, str) else codes):
            yield "wrong", f"{row['error_type'] or 'no error'}, not {codes}"
        return
    if row["error_type"]:
        yield "lost", f"{row['error_type']}: {row['error_message']}"
        return
    parts = [part for turn in json.loads(row["messages"]) for part in turn["content"]]
    stills = [pixels_of(image) for image in row["images"]]
    frames = pixels_of(row["videos"][0]) if row["videos"] else np.zeros((0, 0, 0, 3), np.uint8)
    pictures = [picture[0] for picture in stills] or list(frames[:1])
    found = {
        "id": row["sample_id"],
        "text": "".join(part.get("text", "") for part in parts),
        "parts": "".join(part["type"][0] for part in parts),
        "size": [*pictures[0].shape[1::-1]] if pictures else None,
        "num_frames": len(frames),
    }
    yield from (("wrong", f"{name} {found[name]}") for name in found if name in wanted and found[name] != wanted[name])
    quarters = wanted.get("all_quadrants", [wanted["quadrants"]] if "quadrants" in wanted else [])
    if len(quarters) > len(pictures):
        yield "lost", f"{len(pictures)} pictures of {len(quarters)}"
    for picture, colours in zip(pictures, quarters):
        if not has_colours(picture, colours, wanted.get("tol", DEFAULT_TOLERANCE)):
            yield "wrong", f"colours {[colour.round().tolist() for colour in quarters_of(picture)]}"
    if "bars" in wanted:
        bars = [round(float(middle_of(frame).mean())) for frame in frames]
        if len(bars) != len(wanted["bars"]) or np.abs(np.subtract(bars, wanted["bars"])).max() > BAR_TOLERANCE:
            yield "wrong", f"frames {bars}"


def pixels_of(medium: dict[str, Any]) -> Any:
    """Return uint8 (num_frames, height, width, 3)."""
    return np.frombuffer(medium["rgb"], np.uint8).reshape(-1, medium["height"], medium["width"], 3)


def middle_of(frame: Any) -> Any:
    height, width = frame.shape[:2]
    return frame[height // 2 - 2 : height // 2 + 2, width // 2 - 2 : width // 2 + 2]


def quarters_of(picture: Any) -> list[Any]:
    """Return the mean colours of the quarters; of the whole picture if it has fewer than two rows or columns."""
    height, width = picture.shape[0] // 2, picture.shape[1] // 2
    if min(height, width) == 0:
        return [picture.mean((0, 1))] * 4
    across = (slice(0, width), slice(width, None))
    return [picture[down, side].mean((0, 1)) for down in (slice(0, height), slice(height, None)) for side in across]


def has_colours(picture: Any, colours: list[list[float]], tolerance: float) -> bool:
    """Return whether the quarters have these mean colours, or their middles have them (a video may show bars)."""
    height, width = picture.shape[:2]
    rows, columns = (height // 4, height - height // 4 - 1), (width // 4, width - width // 4 - 1)
    middles = [picture[row, column].astype(float) for row in rows for column in columns]
    return any(np.abs(np.subtract(found, colours)).max() <= tolerance for found in (quarters_of(picture), middles))


def counts(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers of each outcome by kind of source, and in total, for every tree that was measured."""
    kinds = [*dict.fromkeys(case["kind"] for case in cases)]
    rows = []
    for kind in (*sorted(kinds), "all"):
        chosen = [case for case in cases if kind in (case["kind"], "all")]
        row: dict[str, Any] = {"kind": kind, "num": len(chosen)}
        for tree in ("before", "after"):
            found = Counter(case[tree]["outcome"] for case in chosen)
            row |= {f"{name}_{tree}": found[name] for name in OUTCOMES}
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("inputs", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tree", choices=("before", "after"), default="after", help="the column of the table (after)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    manifest = json.loads((options.folder / "manifest.json").read_text(encoding="utf-8"))
    earlier = read_results(options.results)["cases"] if options.results.exists() else []
    known = {case["id"]: case for case in earlier}
    cases = []
    for case in manifest:
        if case.get("files_here", True):
            outcome, reason = outcome_of(case, options.folder)
            progress(f"{case['id']:32} {outcome:6} {reason[:MAX_REASON_CHARS]}")
            reason = reason.replace(str(options.folder), "FOLDER")[:MAX_REASON_CHARS]
            measured = {options.tree: {"outcome": outcome, "reason": reason}}
            kind = case["source"]["kind"]
            cases.append(known.get(case["id"], {}) | {"id": case["id"], "kind": kind, "what": case["what"]} | measured)
    both = [case for case in cases if "before" in case and "after" in case]
    results = {
        "num_cases": len(manifest),
        "num_measured": len(both),
        "kinds": counts(both),
        "remaining": [case for case in both if case["after"]["outcome"] != "right"],
        "cases": cases,
    }
    write_results(options.results, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
