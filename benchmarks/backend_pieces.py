"""Measures the gain of each piece of the CPU backend by comparing the complete engine with engines without it.

    python -m benchmarks.backend_pieces    # updates results/backend_pieces.json; eight minutes on two cores

Every engine is a process of its own, because pieces affect each other's memory within one process. The engines take
turns, and ratios are of the same round. Figures of deleted pieces are kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from operator import truediv
from typing import Any

from benchmarks.harness.markdown import Results, equality, figure, table
from benchmarks.harness.results import describe_pair, finish, pair_command_line, read_results, results_file
from benchmarks.harness.verdict import spread
from benchmarks.peers.engine_peer import COMPLETE, PIECES
from benchmarks.peers.environment import base_variables
from benchmarks.peers.rounds import ENGINE, Cell, Contender, Launched, Timed, measure_cells
from benchmarks.peers.work import GAMMA, make_work, reference_of
from zoo.text.samples import held_out_prompts

RESULTS = results_file("backend_pieces")
MODES = ("plain", "chain")
CELLS, LAUNCHES, NUM_TOKENS = (Cell(1, 4, 6),), 1, 64
KEPT_FROM = 1.05  # speed relative to the engine without the piece, in any configuration


def rows_of(timed: dict[str, Timed], reference: list[Any], dtype: str) -> dict[str, Results]:
    """Return for every piece the tokens per second of all passes, the complete engine's over them, and the verdict on
    the outputs."""
    rows = {piece: one.row(reference, dtype) for piece, one in timed.items()}
    speeds = {piece: list(map(truediv, row["num_tokens"], row["seconds"])) for piece, row in rows.items()}
    return {
        piece: {
            "tokens_per_s": speeds[piece],
            "complete_over_without": list(map(truediv, speeds[COMPLETE], speeds[piece])),
            "verdict": rows[piece]["verdict"],
        }
        for piece in timed
    }


def pieces_table(results: Results) -> str:
    """Render the ratio of tokens per second of the complete engine to those of the engine without each piece.

    Deleted pieces were measured side by side in one process, with outputs compared with the complete engine's.
    """
    cells = results["cells"]
    measured = {(cell["batch"], cell["mode"]) for cell in cells}
    deleted = [one for one in results["deleted"]["cells"] if (one["batch"], one["mode"]) in measured]
    rows = [(piece, *gains) for piece, *gains in _gains(cells) if piece != COMPLETE]
    rows += [(f"{piece} (in one process)", *gains) for piece, *gains in _gains(deleted)]
    places = [f"{cell['mode']}, batch {cell['batch']}" for cell in cells]
    return table(["piece", *places, "equal outputs", "result"], rows)


def _gains(cells: list[Results]) -> Iterator[tuple[str, ...]]:
    """Yield each piece's name, gain per cell, equality of outputs, and whether a gain reaches `KEPT_FROM`."""
    for piece in cells[0]["pieces"] if cells else ():
        rows = [cell["pieces"][piece] for cell in cells]
        gains = [spread(row["complete_over_without"]) for row in rows]
        is_kept = any(one["median"] >= KEPT_FROM for one in gains)
        total = {name: sum(row["verdict"][name] for row in rows) for name in rows[0]["verdict"]}
        yield piece, *(figure(one, 2) for one in gains), equality(total), "kept" if is_kept else "deleted"


def main(arguments: list[str] | None = None) -> int:
    options = pair_command_line("backend_pieces", __doc__).parse_args(arguments)
    found = describe_pair(options) | {"max_new_tokens": NUM_TOKENS, "gamma": GAMMA, "launches": LAUNCHES, "cells": []}
    prompts = held_out_prompts(max(cell.num_requests for cell in CELLS), 0)
    work = make_work(options, prompts, NUM_TOKENS, max(cell.batch for cell in CELLS))
    variables = base_variables(options.threads, options.scratch, os.environ)
    reference = reference_of(work, options.scratch)
    for mode in MODES:
        contenders = [Contender(piece, piece, "", ENGINE, f"{mode}/{piece}") for piece in PIECES]
        launched = [Launched(one, sys.executable, variables) for one in contenders]
        timed, _ = measure_cells(launched, options.scratch / "work.json", CELLS, LAUNCHES, reference, work.dtype)
        found["cells"] += [
            {"batch": cell.batch, "mode": mode, "pieces": rows_of(one, reference[: cell.num_requests], work.dtype)}
            for cell, one in timed.items()
        ]
    found["deleted"] = read_results(RESULTS)["deleted"]
    return finish(RESULTS, found, pieces_table)


if __name__ == "__main__":
    sys.exit(main())
