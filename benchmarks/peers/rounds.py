"""Starts the contenders' processes and times passes at one batch size; one peer runs, the others are stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.markdown import equality
from benchmarks.harness.process import Outcome, Peer
from benchmarks.harness.results import progress
from benchmarks.harness.verdict import judge, make_row, turns


class Contender(NamedTuple):
    """A measured configuration: one `variant` of an engine (`row`); `single` contenders decode one sample at a time."""

    name: str
    row: str
    variant: str
    module: str
    mode: str
    single: bool = False

    @property
    def is_vllm(self) -> bool:
        return self.module == VLLM


ENGINE, TRANSFORMERS, VLLM = (f"benchmarks.peers.{name}_peer" for name in ("engine", "transformers", "vllm"))
CONTENDERS = (
    Contender("engine_plain", "draftfleet", "", ENGINE, "plain"),
    Contender("engine_chain", "draftfleet, drafter", "always γ", ENGINE, "chain"),
    Contender("engine_controlled", "draftfleet, drafter", "controller", ENGINE, "controlled"),
    Contender("generate_eager", "transformers", "eager", TRANSFORMERS, "eager"),
    Contender("generate_compiled", "transformers", "compiled", TRANSFORMERS, "compiled"),
    Contender("assisted", "transformers, drafter", "whole drafts", TRANSFORMERS, "assisted", True),
    Contender(
        "assisted_confident", "transformers, drafter", "stops when unsure", TRANSFORMERS, "assisted_confident", True
    ),
    Contender("vllm_plain", "vLLM", "", VLLM, "plain"),
    Contender("vllm_draft_model", "vLLM, drafter", "", VLLM, "draft_model"),
    Contender("vllm_ngram", "vLLM, n-grams", "", VLLM, "ngram"),
)


class Cell(NamedTuple):
    """Batch size, requests of a pass, and passes in each launch."""

    batch: int
    num_requests: int
    num_passes: int


class Launched(NamedTuple):
    """A contender, and the interpreter and environment variables of its process."""

    contender: Contender
    python: str
    variables: Mapping[str, str]


def run_launch(
    launched: Sequence[Launched], work_file: Path, cells: Sequence[Cell]
) -> Iterator[tuple[Cell, dict[str, Peer]]]:
    """Start every process; yield each cell with its paused peers. Logs are in the folder `logs` beside the work file.

    Peers of `single` contenders take part at batch 1 only, and are ended after the last batch of 1.
    """
    with ExitStack() as open_peers:
        peers: dict[str, Peer] = {}
        for contender, python, variables in launched:
            start = time.perf_counter()
            command = [python, "-m", contender.module, str(work_file), contender.mode]
            peer = Peer(contender.name, command, variables, work_file.parent / "logs" / f"{contender.name}.log")
            peers[contender.name] = open_peers.enter_context(peer)
            peer.wait_ready()
            peer.pause()
            progress(f"{contender.name:30s} ready in {time.perf_counter() - start:.1f} s")
        singles = {launch.contender.name for launch in launched if launch.contender.single}
        for number, cell in enumerate(cells):
            if all(later.batch != 1 for later in cells[number:]):
                for name in singles:
                    peers[name].close()
            yield cell, {n: peer for n, peer in peers.items() if cell.batch == 1 or n not in singles}


def measure_cells(
    launched: Sequence[Launched],
    work_file: Path,
    cells: Sequence[Cell],
    launches: int,
    reference: Sequence[dict[str, Any]],
    dtype: str,
) -> tuple[dict[Cell, dict[str, Timed]], dict[str, Any]]:
    """Measure all contenders, launch by launch; return the passes of each cell by contender, and their versions."""
    timed: dict[Cell, dict[str, Timed]] = {cell: {} for cell in cells}
    versions: dict[str, Any] = {}
    for launch in range(launches):
        progress(f"launch {launch + 1} of {launches}")
        for cell, peers in run_launch(launched, work_file, cells):
            versions |= {name: peer.versions for name, peer in peers.items()}
            orders = list(turns(list(peers), launches * cell.num_passes))[launch::launches]
            measure_batch(peers, cell.batch, reference[: cell.num_requests], dtype, orders, timed[cell])
    return timed, versions


@dataclass
class Timed:
    """Passes of one peer at one batch size, over all of its launches."""

    passes: list[Outcome] = field(default_factory=list)
    peak_bytes: int = 0
    warm_s: list[float] = field(default_factory=list)

    def row(self, reference: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, Any]:
        """Summarise the passes; see `benchmarks.harness.verdict.make_row`."""
        return make_row(self.passes, reference, dtype, self.peak_bytes) | {"warm_s": self.warm_s}


def measure_batch(
    peers: Mapping[str, Peer],
    batch: int,
    reference: Sequence[dict[str, Any]],
    dtype: str,
    orders: Sequence[Sequence[str]],
    timed: dict[str, Timed],
) -> None:
    """Warm up all peers, then time a pass over the reference's prompts for each name in each order, into `timed`."""

    def run(name: str, verb: str) -> tuple[Outcome, float]:
        peer, start = peers[name], time.perf_counter()
        peer.resume()
        try:
            outcome = peer.ask(verb, batch, len(reference))
        finally:
            peer.pause()
        spent_s = time.perf_counter() - start
        count = len(outcome.outputs)
        verdict = equality(asdict(judge(outcome.outputs, reference[:count], dtype)))
        progress(f"batch {batch:3d}  {name:20s} {verb:4s} {spent_s:8.2f} s  {count} outputs, equal {verdict}")
        return outcome, spent_s

    for name in peers:
        timed.setdefault(name, Timed()).warm_s.append(run(name, "warm")[1])
    for order in orders:
        for name in order:
            record = timed[name]
            peers[name].forget_peak()
            record.passes.append(run(name, "run")[0])
            record.peak_bytes = max(record.peak_bytes, peers[name].peak_bytes())
