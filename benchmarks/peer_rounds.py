"""All peers at one batch size: warmed up first, then timed in turn, one running while the others stand still.

Knows peers as `benchmarks.peer_process` has them, and nothing of what they run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peer_process import Outcome, Peer
from benchmarks.peer_tables import equality
from benchmarks.peer_verdict import judge, make_row


def turns(peers: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """The order of each round: a circle that everyone enters elsewhere each time, as far apart as the rounds allow."""
    for number in range(num_rounds):
        start = number * len(peers) // num_rounds
        yield [*peers[start:], *peers[:start]]


def measure_batch(
    peers: Mapping[str, Peer],
    batch: int,
    reference: Sequence[dict[str, Any]],
    dtype: str,
    num_rounds: int,
) -> dict[str, dict[str, Any]]:
    """The rows of all peers at one batch size, over the prompts that `reference` has."""
    count = len(reference)
    passes: dict[str, list[Outcome]] = {name: [] for name in peers}
    peaks = dict.fromkeys(peers, 0)
    warmed: dict[str, float] = {}
    for name, peer in peers.items():
        start = time.perf_counter()
        outcome = ask(peer, "warm", batch, count)
        warmed[name] = time.perf_counter() - start
        _report(batch, name, "warm", warmed[name], outcome, reference, dtype)
    for order in turns(list(peers), num_rounds):
        for name in order:
            peers[name].forget_peak()
            passes[name].append(ask(peers[name], "run", batch, count))
            peaks[name] = max(peaks[name], peers[name].peak_bytes())
            _report(batch, name, "run", passes[name][-1].seconds, passes[name][-1], reference, dtype)
    return {name: make_row(passes[name], reference, dtype, peaks[name]) | {"warm_s": warmed[name]} for name in peers}


def ask(peer: Peer, verb: str, batch: int, count: int) -> Outcome:
    """One pass of a peer that stands still otherwise."""
    peer.resume()
    try:
        return peer.ask(verb, batch, count)
    finally:
        peer.pause()


def _report(
    batch: int,
    name: str,
    verb: str,
    seconds: float,
    outcome: Outcome,
    reference: Sequence[Mapping[str, Any]],
    dtype: str,
) -> None:
    verdict = judge(outcome.outputs, reference[: len(outcome.outputs)], dtype)
    told = f"{len(outcome.outputs)} outputs, equal {equality(asdict(verdict))}"
    print(f"batch {batch:3d}  {name:20s} {verb:4s} {seconds:8.2f} s  {told}", file=sys.stderr, flush=True)
