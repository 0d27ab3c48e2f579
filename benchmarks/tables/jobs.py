"""Rows of `benchmarks.scale`, `benchmarks.guarantees`, `benchmarks.decode`, and of fleets that grow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.harness.markdown import Results, percent
from benchmarks.harness.verdict import spread
from benchmarks.tables.fleet import FLEETS, needs_of, rows_per_s_of_a_driver
from benchmarks.tables.specs import Function


def _moments(results: Results) -> Iterator[Results]:
    """Yield nodes and actors of a job over time."""
    end = next((moment for moment in results["time_line"] if moment["at_s"] >= results["job_done_at_s"]), None)
    for moment in results["time_line"]:
        yield moment | {"note": "the job has ended" if moment is end else ""}


def _driver(results: Results) -> Iterator[Results]:
    costs = results["driver"]
    for cell in costs["cells"]:
        size = cell["batch_rows"]
        spared = 1000 * costs["cpu_ms_per_batch"]["driver"] / size
        yield cell | {"spared": spared, "rows_per_s": rows_per_s_of_a_driver(costs, size)}


def _fleets(results: Results) -> Iterator[Results]:
    for fleet in results["fleets"]:
        rates = {"wanted": fleet["rows_per_s_each"] * fleet["num_actors"], "made": fleet["num_rows"] / fleet["wall_s"]}
        yield fleet | rates | {"share": fleet["cpu_s"]["driver"] / fleet["total_s"]}


def _ledger(row: Results) -> Results:
    return {"rows_per_s": row["rows"] * row["batches_per_s"]}


def _planned(row: Results) -> Results:
    return {"per_million": 1e6 * row["wall_s"] / row["num_rows"]}


def _model(results: Results) -> Iterator[Results]:
    for fleet in FLEETS:
        yield {**vars(fleet), **needs_of(fleet, results)}


def _decoders(results: Results) -> Iterator[Results]:
    throughput = results["throughput"]
    for name, cell in throughput["cells"].items():
        case, _, decoder = name.partition("/")
        what, by = f"640 × 480 JPEG to {throughput['side_px']} px", "Pillow"
        if decoder:
            frames, gop = f"{throughput['num_frames']} frames to {throughput['side_px']} px", case.rpartition("_")[2]
            what, by = f"480p H.264, 10 s, {frames}, a key frame every {gop} frames", f"`{decoder}`"
            plain = throughput["cells"].get(f"{case}/plain")
            if decoder == "plain":
                by = "a plain loop of PyAV"
            elif plain is not None:
                by += f", {cell['rows_per_cpu_s'] / plain['rows_per_cpu_s']:.0%} of the plain loop"
        yield cell | {"what": what, "by": by}


def _memory(results: Results) -> Iterator[Results]:
    labels = ("replaced as configured", "never replaced")
    for label, run in zip(labels, results["memory"]["runs"].values(), strict=True):
        yield run | {"label": label}


def _waits(results: Results) -> Iterator[Results]:
    for name, cell in results["waits"]["cells"].items():
        yield cell | {"share": name.removeprefix("actor_at_").removesuffix("_of_the_limit")}


def _audits(results: Results) -> Iterator[Results]:
    for name, case in results["cases"].items():
        seeds = case["seeds"]
        ends = sorted(seed["half_budget_ends_at"] for seed in seeds if seed["half_budget_ends_at"] is not None)
        audited = sorted(seed["num_rows"] for seed in seeds)
        yield case | {
            "name": name,
            "audited": f"{audited[0]} to {audited[-1]}",
            "widest": max(seed["high"] - seed["low"] for seed in seeds),
            "inside": f"{sum(seed['is_inside'] for seed in seeds)} of {len(seeds)}",
            "outside": f"{sum(seed['ever_outside'] for seed in seeds)} of {len(seeds)}",
            "ended": f"{len(ends)} of {len(seeds)}" + (f", median {ends[len(ends) // 2]} rows" if ends else ""),
        }


def is_right(workload: Results) -> bool:
    """Return whether the whole jobs support the recommendation: a recommended method is faster in all of them, and
    without a recommendation the chain is not 5 % faster in the median."""
    if workload["verdict"]["recommended"] == "none":
        return bool(statistics.median(workload["speedups"]) < 1.05)
    return bool(min(workload["speedups"]) > 1)


def _estimates(results: Results) -> Iterator[Results]:
    for name, workload in results["workloads"].items():
        chain = next(method for method in workload["verdict"]["methods"] if method["method"] == "chain")
        limits = chain["speedup"]
        interval = f" ({limits['low']:.2f} to {limits['high']:.2f})" if limits["high"] is not None else ""
        figures = {"speedup": f"{limits['value']:.2f}{interval}", "is": "right" if is_right(workload) else "wrong"}
        yield {"name": name, **chain, **workload, **figures, "whole": spread(workload["speedups"])}


def _detections(results: Results) -> Iterator[Results]:
    number = results["num_seeds"]
    for cell in results["detection"]["cells"]:
        detected = f"{percent(cell['num_found'] / number, 1)} ({cell['num_found']:,} of {number:,})"
        yield cell | {"found": detected, "share_shown": f"{100 * cell['share']:g} %"}


def _clean(row: Results) -> Results:
    return {"how": ", ".join(f"{name} {value:g}" for name, value in row["sampling"].items()) or "greedy"}


FUNCTIONS: dict[str, Function] = {
    "moments": _moments,
    "driver": _driver,
    "fleets": _fleets,
    "ledger_rate": _ledger,
    "planned": _planned,
    "fleet_model": _model,
    "decoders": _decoders,
    "decoding_memory": _memory,
    "decoding_waits": _waits,
    "audits": _audits,
    "estimates": _estimates,
    "detections": _detections,
    "clean_output": _clean,
}
