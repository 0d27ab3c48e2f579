"""What methods take alone, on the same rows in turns: what `benchmarks.auto` holds a trial's choice against.

Owns the rows, and that all methods give the same tokens. Knows no trials.
"""

from __future__ import annotations

import time

from actors.auto.comparison import Block, Comparison
from actors.loading.pair import Pair
from decoding import Request, Sampling
from zoo.text_samples import held_out_prompts

MAX_CONTEXT_TOKENS = 256
MIN_ROWS = 16


def requests(num_rows: int, length: int, first: int = 0) -> list[Request]:
    """Held-out questions with answers of exactly so many tokens."""
    sampling = Sampling(max_new_tokens=length, ignore_eos=True)
    prompts = held_out_prompts(200, 0)
    return [Request(f"row-{row}", prompts[row % 200], sampling=sampling) for row in range(first, first + num_rows)]


Tokens = dict[str, tuple[int, ...]]


class Alone:
    """Every method alone on the same rows, in turns; what `measure` is called for before and after a trial counts as
    one measurement, so that a machine which changes meanwhile widens the interval.

    Raises:
        RuntimeError: a row failed, or two methods gave different tokens.
    """

    def __init__(self, pair: Pair, slots: int, length: int, rows_per_slot: int) -> None:
        methods = {one.label: one for one in pair.config.method.methods}
        self._engines = {name: pair.engine(slots, one) for name, one in methods.items()}
        self._rows = requests(max(MIN_ROWS, rows_per_slot * slots), length)
        self._blocks: list[Block] = []
        self._num_turns = 0
        self.lengths: dict[str, float] = {}
        self.tokens: Tokens = {}
        self._take_turns()
        self._blocks.clear()  # the first turn warms up

    def measure(self, num_repeats: int) -> None:
        """Let every method decode all rows so many times."""
        for _ in range(num_repeats):
            self._take_turns()

    @property
    def comparison(self) -> Comparison:
        """Seconds per row of all methods, from all that was measured."""
        return Comparison(self._blocks, 0.0)

    def _take_turns(self) -> None:
        self._num_turns += 1
        for name in self._engines if self._num_turns % 2 else reversed(self._engines):
            start = time.perf_counter()
            done = list(self._engines[name].run(self._rows))
            seconds = time.perf_counter() - start
            check_equal(self.tokens, {one.sample_id: one.token_ids for one in done}, name)
            self._blocks.append(Block(name, self._num_turns, seconds / len(done), 0.0, 1.0, len(done)))
            steps = sum(one.telemetry.num_spec_steps for one in done)
            self.lengths[name] = 1 + sum(one.telemetry.num_accepted_draft_tokens for one in done) / max(1, steps)


def check_equal(known: Tokens, found: Tokens, name: str) -> None:
    for row, tokens in found.items():
        if not tokens or known.setdefault(row, tokens) != tokens:
            raise RuntimeError(f"{row}: {name} gives other tokens than the method before it, or none")
