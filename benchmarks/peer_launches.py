"""Launches: every peer's process started once, for all batch sizes, and ended.

Knows processes and who of them takes part at which batch size; nothing of what is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peer_contenders import Contender
from benchmarks.peer_process import Peer


class Launched(NamedTuple):
    """How a contender's process is started: by which interpreter, over which work, with which environment."""

    contender: Contender
    python: str
    work_file: Path
    variables: dict[str, str]
    log: Path


def run_launch(
    launched: Sequence[Launched], batches: Sequence[int]
) -> Iterator[tuple[int, dict[str, Peer], dict[str, Any]]]:
    """Start every process: for each batch size the peers that take part, standing still, and what versions all told.

    Those that run one row at a time take part at batch 1, and are ended when no more of that is to come.
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
            print(f"{one.name:30s} ready in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        versions = {name: peer.versions for name, peer in peers.items()}
        singles = {one.contender.name for one in launched if one.contender.single}
        for number, batch in enumerate(batches):
            if 1 not in batches[number:]:
                for name in singles:
                    # Once is enough: closing again does nothing.
                    peers[name].close()
            there = {name: peer for name, peer in peers.items() if batch == 1 or name not in singles}
            yield batch, there, versions
