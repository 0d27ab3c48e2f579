"""Runs contenders on one work: makes vLLM's environment and the reference, launches all peers, collects their rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.process import Work
from benchmarks.harness.results import cores
from benchmarks.harness.verdict import TOLERANCE_ULPS
from benchmarks.peers.environment import base_variables, make_environment, preloads, python_of, vllm_variables
from benchmarks.peers.rounds import Cell, Contender, Launched, measure_cells
from benchmarks.peers.work import WORK_FILE, reference_of


def compare(
    work: Work, contenders: Sequence[Contender], cells: Sequence[Cell], launches: int, scratch: Path
) -> dict[str, Any]:
    """Measure all contenders in all cells; `work` is written in the folder `scratch`. Raises PeerError,
    EnvironmentRefused."""
    variables = base_variables(work.threads, scratch, os.environ)
    pythons = {True: str(python_of(scratch / "vllm")), False: sys.executable}
    environments = {True: variables, False: variables}
    if any(contender.is_vllm for contender in contenders):
        make_environment(scratch / "vllm")
        vllm_only = vllm_variables(cores()[: work.threads], scratch)
        environments[True] = {**variables, **vllm_only, "LD_PRELOAD": preloads(scratch / "vllm")}
    reference = reference_of(work, scratch)
    launched = [
        Launched(contender, pythons[contender.is_vllm], environments[contender.is_vllm]) for contender in contenders
    ]
    timed, versions = measure_cells(launched, scratch / WORK_FILE, cells, launches, reference, work.dtype)
    return {
        "gamma": work.gamma,
        "max_new_tokens": work.max_new_tokens,
        "ignore_eos": work.ignore_eos,
        "launches": launches,
        "tolerance_ulps": TOLERANCE_ULPS,
        "versions": versions,
        "rows": [
            {"batch": cell.batch, "name": contender.name, "row": contender.row, "variant": contender.variant}
            | by_name[contender.name].row(reference[: cell.num_requests], work.dtype)
            for cell, by_name in timed.items()
            for contender in contenders
            if contender.name in by_name
        ],
    }
