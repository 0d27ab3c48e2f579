"""Rows and checks of `benchmarks.real`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.claims.checks import Check, Equal
from benchmarks.claims.load import claims_table
from benchmarks.claims.reader import Reader, Samples
from benchmarks.harness.markdown import Results
from benchmarks.harness.samples import read_samples, samples_file
from benchmarks.tables.methods import samples_by_cell
from benchmarks.tables.specs import Function


def equal_rows(row: Results) -> Results:
    """Return the number of equal outputs as text."""
    if "num_equal" not in row:
        return {"equal": "–"}
    others = ""
    if row["num_equal"] < row["num_sequences"] and "num_close" in row:
        others = f" ({row['num_close']} at ties, {row['num_different']} beyond)"
    return {"equal": f"{row['num_equal']} of {row['num_sequences']}{others}"}


def _replayed(results: Results) -> Iterator[Results]:
    """Yield tokens per second of the vision pair at batch 1 on a GPU, with steps launched and replayed."""
    launched, replayed = (
        {row["method"]: row for row in results["vision"][part]["rows"] if row["batch"] == 1}
        for part in ("cuda_launched", "cuda")
    )
    for name, row in replayed.items():
        both = (launched[name], row)
        before, after = (row["tokens_per_s"]["median"] for row in both)
        lengths = " / ".join(f"{row['mean_acceptance_length']:.2f}" for row in both)
        yield row | {"lengths": lengths, "launched": launched[name]["tokens_per_s"], "faster": after / before}


def _methods(results: Results) -> Iterator[Results]:
    for name, result in results["methods"].items():
        (cell,) = result["scenarios"].values()
        yield {"name": name.split("/")[0], "by": result["drafter"] or "", **result, **cell}


def _cells(results: Results, key: str) -> list[Results]:
    return [results["methods"][key]["scenarios"][results["scenario"]]]


def _lossless(results: Results) -> dict[str, Results]:
    return {
        name: _cells(results, name)[0]
        for name, result in results["methods"].items()
        if result["verify_mode"] == "lossless" and result["acceptance"] == "exact" and not name.startswith("plain")
    }


def reader(results: Results) -> Reader:
    scenario = results["scenario"]
    source = {"dense": "real_vision", "clip": "real_vision_clips"}[scenario]
    by_cell = samples_by_cell(read_samples(samples_file(source)))

    def samples(key: str) -> list[Samples]:
        return [by_cell.get((key, scenario), {})]

    return Reader(results, _cells, samples)


CHECKS: dict[str, Check] = {"lossless": Equal(_lossless, "settings of {} scenes")}
FUNCTIONS: dict[str, Function] = {
    "equal_rows": equal_rows,
    "replayed_steps": _replayed,
    "vision_methods": _methods,
    "vision_claims": lambda results: claims_table("real_vision", CHECKS, reader(results)),
    "clip_claims": lambda results: claims_table("real_vision_clips", CHECKS, reader(results)),
}
