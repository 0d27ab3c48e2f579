"""A peer without an engine: it returns the first tokens of each prompt reversed, and can fail on request."""

from __future__ import annotations

import sys
import threading

from benchmarks.harness.process import Outcome, Work, serve


class ToyRunner:
    """Modes: `echo`; `fail` at the first pass; `hang` in it; `die` in it."""

    def __init__(self, work: Work, mode: str) -> None:
        print("a library that prints what nobody asked for")
        if mode == "refuse":
            raise ValueError("this peer cannot be loaded")
        self._work, self._mode = work, mode
        self._ballast = b""

    def versions(self) -> dict[str, str]:
        return {"toy": "1"}

    def warm(self, batch: int, num_requests: int) -> Outcome:
        return self.run(batch, min(batch, num_requests))

    def run(self, batch: int, num_requests: int) -> Outcome:
        print("noise between the answers", flush=True)
        if self._mode == "fail":
            raise RuntimeError("out of toys")
        if self._mode == "die":
            sys.exit(3)
        if self._mode == "hang":
            threading.Event().wait()
        # Written to, so that it is resident.
        self._ballast = b"x" * (batch << 20)
        return Outcome(0.5, [ids[::-1] for ids in self._work.prompt_ids[:num_requests]], 4, 6)


if __name__ == "__main__":
    sys.exit(serve(ToyRunner))
