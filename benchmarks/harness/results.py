"""Reads and writes result files, and defines the command line and machine description of all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "results"


def results_file(name: str) -> Path:
    return FOLDER / f"{name}.json"


def write_results(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def read_results(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def progress(*parts: object) -> None:
    """Print one line to standard error."""
    print(*parts, file=sys.stderr, flush=True)


def cores() -> list[int]:
    """Return the CPU cores available to this process."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def machine() -> str:
    """Return CPU name, number of cores and current load; call it before measuring."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{[*names, platform.machine()][0]}, {len(cores())} cores, load {os.getloadavg()[0]:.1f} at the start"


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m benchmarks.NAME`."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").split("\n")[0])


def pair_command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return `command_line` with the arguments of benchmarks on the inflated text pair."""
    parser = command_line(name, doc)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    parser.add_argument("--target-shape", default="0.3B")
    parser.add_argument("--drafter-shape", default="draft-0.05")
    parser.add_argument("--scratch", type=Path, default=FOLDER.parents[1] / ".bench")
    return parser


def describe_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a benchmark on the inflated text pair, the machine and torch; call it before measuring."""
    settings = {name: getattr(options, name) for name in ("target_shape", "drafter_shape", "dtype", "threads")}
    return {**settings, "machine": machine(), "torch": version("torch")}
