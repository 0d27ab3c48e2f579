"""Measures the gain of each piece of the CPU backend by comparing the complete engine with engines without it.

    python -m benchmarks.backend_pieces            # updates results/backend_pieces.json; half an hour on two cores
    python -m benchmarks.backend_pieces --quick    # few short requests, printed only

All engines decode the same requests side by side in one process, in slices of half a second, so that changes of the
machine's speed affect all of them. Ratios are of the same round. Results of pieces that were deleted are kept.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from operator import truediv
from typing import Any
from unittest import mock

from benchmarks.engine.__main__ import Bench, Cell
from benchmarks.engine.slices import run_side_by_side
from benchmarks.harness.markdown import Results, figure, table
from benchmarks.harness.process import Outcome
from benchmarks.harness.results import describe_pair, finish, pair_command_line, read_results, results_file
from benchmarks.harness.verdict import spread, turns
from benchmarks.peers.work import inflated_pair, make_work
from zoo.text.samples import held_out_prompts

RESULTS = results_file("backend_pieces")
CPU, COMPLETE = "models.backends.cpu", "complete"
PIECES: dict[str, AbstractContextManager[Any]] = {
    COMPLETE: nullcontext(),
    "GEMM kernel": mock.patch(f"{CPU}.packing.can_multiply", return_value=False),
    "attention kernel": mock.patch(f"{CPU}.layer_graph.can_attend", return_value=False),
    "direct graph calls": mock.patch(f"{CPU}.layer_graph._picker", return_value=None),
}
"""Piece → a context in which the backend runs without it."""
FORMER_NAMES = {"guards bypassed": "direct graph calls"}
KEPT_FROM = 1.05  # speed relative to the engine without the piece, in any configuration
CELLS = (Cell(1, 64, 4, 7), Cell(8, 64, 16, 5), Cell(32, 64, 48, 5))
QUICK = (Cell(1, 16, 2, 2), Cell(4, 16, 4, 2))


def measure_cell(benches: dict[str, Bench], mode: str, cell: Cell) -> Results:
    """Return tokens per second of every engine in every round, and the share of outputs equal to the complete
    engine's."""
    engines = {piece: bench.engine(mode, cell) for piece, bench in benches.items()}
    requests = benches[COMPLETE].requests(cell)
    for _ in range(2):
        run_side_by_side(engines, list(PIECES), requests[: 2 * cell.batch], PIECES)
    outcomes: dict[str, list[Outcome]] = {piece: [] for piece in engines}
    for order in turns(list(engines), cell.repeats):
        for piece, one in run_side_by_side(engines, order, requests, PIECES).items():
            outcomes[piece].append(one.outcome)
    speeds = {piece: [sum(map(len, one.outputs)) / one.seconds for one in each] for piece, each in outcomes.items()}
    outputs = {piece: [tokens for one in each for tokens in one.outputs] for piece, each in outcomes.items()}
    rows = {
        piece: {
            "tokens_per_s": speeds[piece],
            "complete_over_without": list(map(truediv, speeds[COMPLETE], speeds[piece])),
            "num_outputs": len(outputs[piece]),
            "num_equal": sum(map(list.__eq__, outputs[piece], outputs[COMPLETE])),
        }
        for piece in engines
    }
    return {"batch": cell.batch, "mode": mode, "pieces": rows}


def cells_of(results: Results) -> dict[tuple[int, str], Results]:
    """Return (batch, mode) → rows, by the present name of their piece."""
    return {
        (cell["batch"], cell["mode"]): {FORMER_NAMES.get(name, name): row for name, row in cell["pieces"].items()}
        for cell in results["cells"]
    }


def merge(old: Results, new: Results) -> Results:
    """Return `new` with the rows of `old` that it lacks, each with the settings of its run."""
    settings = {name: value for name, value in old.items() if name != "cells"}
    cells = {place: {name: settings | row for name, row in rows.items()} for place, rows in cells_of(old).items()}
    for place, rows in cells_of(new).items():
        cells[place] = cells.get(place, {}) | rows
    return new | {"cells": [{"batch": batch, "mode": mode, "pieces": rows} for (batch, mode), rows in cells.items()]}


def pieces_table(results: Results) -> str:
    """Render the ratio of tokens per second of the complete engine to those of the engine without each piece."""
    cells, rows = cells_of(results), []
    for piece in dict.fromkeys(name for pieces in cells.values() for name in pieces if name != COMPLETE):
        gains = [spread(one[piece]["complete_over_without"]) if piece in one else None for one in cells.values()]
        is_kept = any(one["median"] >= KEPT_FROM for one in gains if one)
        rows.append((piece, *(figure(one, 2) if one else "–" for one in gains), "kept" if is_kept else "deleted"))
    return table(["piece", *(f"{mode}, batch {batch}" for batch, mode in cells), "result"], rows)


def main(arguments: list[str] | None = None) -> int:
    options = pair_command_line("backend_pieces", __doc__, "few short requests").parse_args(arguments)
    options.gamma, cells = 5, QUICK if options.quick else CELLS
    found = describe_pair(options) | {"max_new_tokens": cells[0].max_new_tokens}
    prompts = held_out_prompts(cells[-1].num_requests, 0)
    work = make_work(options, *inflated_pair(options), prompts, found["max_new_tokens"], cells[-1].batch)
    benches = {}
    for piece, context in PIECES.items():
        with context:
            benches[piece] = Bench(work)
    found["cells"] = [measure_cell(benches, mode, cell) for cell in cells for mode in ("plain", "chain")]
    return finish(options, RESULTS, found if options.quick else merge(read_results(RESULTS), found), pieces_table)


if __name__ == "__main__":
    sys.exit(main())
