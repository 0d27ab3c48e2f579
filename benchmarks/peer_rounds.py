"""All peers at one batch size: warmed up first, then timed in turn, one running while the others stand still.

Knows peers as `benchmarks.peer_process` has them, and nothing of what they run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peer_process import Outcome, Peer
from benchmarks.peer_tables import equality
from benchmarks.peer_verdict import judge, make_row


def turns(peers: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """The order of each round: a circle that everyone enters elsewhere each time, as far apart as the rounds allow."""
    for number in range(num_rounds):
        start = number * len(peers) // num_rounds
        yield [*peers[start:], *peers[:start]]


@dataclass
class Timed:
    """What one peer did at one batch size, in all of its launches."""

    passes: list[Outcome] = field(default_factory=list)
    peak_bytes: int = 0
    warm_s: list[float] = field(default_factory=list)

    def row(self, reference: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, Any]:
        """See `benchmarks.peer_verdict.make_row`."""
        return make_row(self.passes, reference, dtype, self.peak_bytes) | {"warm_s": self.warm_s}


def measure_batch(
    peers: Mapping[str, Peer],
    batch: int,
    reference: Sequence[dict[str, Any]],
    dtype: str,
    orders: Sequence[Sequence[str]],
    timed: dict[str, Timed],
) -> None:
    """Add to `timed` what all peers do at one batch size, over the prompts that `reference` has, a pass for each name
    in each of the `orders`."""
    count = len(reference)
    for name, peer in peers.items():
        one = timed.setdefault(name, Timed())
        start = time.perf_counter()
        outcome = ask(peer, "warm", batch, count)
        one.warm_s.append(time.perf_counter() - start)
        _report(batch, name, "warm", one.warm_s[-1], outcome, reference, dtype)
    for order in orders:
        for name in order:
            one, peer = timed[name], peers[name]
            peer.forget_peak()
            one.passes.append(ask(peer, "run", batch, count))
            one.peak_bytes = max(one.peak_bytes, peer.peak_bytes())
            _report(batch, name, "run", one.passes[-1].seconds, one.passes[-1], reference, dtype)


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
