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
from benchmarks.harness.verdict import judge, make_row


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


class Launched(NamedTuple):
    """Arguments that start the process of a contender."""

    contender: Contender
    python: str
    work_file: Path
    variables: dict[str, str]
    log: Path


def run_launch(
    launched: Sequence[Launched], batches: Sequence[int]
) -> Iterator[tuple[int, dict[str, Peer], dict[str, Any]]]:
    """Start every process; yield for each batch size its paused peers and the versions of all peers.

    Peers of `single` contenders take part at batch 1 only, and are ended after the last batch of 1.
    """
    with ExitStack() as open_peers:
        peers: dict[str, Peer] = {}
        for one, python, work_file, variables, log in launched:
            start = time.perf_counter()
            command = [python, "-m", one.module, str(work_file), one.mode]
            peer = open_peers.enter_context(Peer(one.name, command, variables, log))
            peer.wait_ready()
            peer.pause()
            peers[one.name] = peer
            progress(f"{one.name:30s} ready in {time.perf_counter() - start:.1f} s")
        versions = {name: peer.versions for name, peer in peers.items()}
        singles = {one.contender.name for one in launched if one.contender.single}
        for number, batch in enumerate(batches):
            if 1 not in batches[number:]:
                for name in singles:
                    peers[name].close()
            yield batch, {n: peer for n, peer in peers.items() if batch == 1 or n not in singles}, versions


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
            one = timed[name]
            peers[name].forget_peak()
            one.passes.append(run(name, "run")[0])
            one.peak_bytes = max(one.peak_bytes, peers[name].peak_bytes())
