"""Compares recorded results with those of a second decoding, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from actors.losses import Loss, Output
from actors.margins import ASKED
from pipeline.reports.loss import Losses
from pipeline.rows.columns import DIFFERENCES
from pipeline.verify.rows import recorded_columns

EQUAL, TIE, DIFFERENT, NOT_COMPARED = "equal", "tie", "different", "not_compared"
MAX_MARGINS = 10_000
"""Maximum number of rows of a round whose margins are computed; further differing rows count as different."""

KEY = ("sample_id", "source", "row_index", "clip_index", "prompt_index")
"""Columns by which recorded results and those of the second decoding are joined."""
SCHEMA = pa.schema([(name, kind) for name, kind, _ in DIFFERENCES])


class RowComparison:
    """Compares the results of one round (`recorded`, a table of `RECORDED`) with results as they arrive.

    `differences` has one dictionary per row that is not equal, with the columns of `DIFFERENCES`. Every recorded row is
    compared, also several of one sample.
    """

    def __init__(self, recorded: pa.Table, loss: Loss) -> None:
        self._recorded = recorded
        self._indices: dict[tuple[Any, ...], list[int]] = {}
        for index, row in enumerate(recorded.select(list(KEY)).to_pylist()):
            self._indices.setdefault(tuple(row.values()), []).append(index)
        self._loss = loss
        self.losses = Losses()
        self.differences: list[dict[str, Any]] = []
        self.counts = Counter[str]()
        self._samples: set[tuple[str, int]] = set()

    def add(self, results: pa.Table) -> None:
        """Compare a table of results, of which rows without a recorded result are ignored."""
        errors = results.select(["error_type", "error_message"])
        for row, error in zip(recorded_columns(results).to_pylist(), errors.to_pylist(), strict=True):
            row |= error
            # Without a place it is another prompt or clip of a chosen sample, which failed in the job.
            for index in self._indices.pop(tuple(row[name] for name in KEY), ()):
                self._compare(self._recorded.slice(index, 1).to_pylist()[0], row)

    def _compare(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        if new["error_type"]:
            self._differ(old, NOT_COMPARED, error_type=new["error_type"], error_message=new["error_message"])
            return
        recorded, again = _output(old), _output(new)
        by_tokens = recorded.token_ids is not None
        compared = "tokens" if by_tokens else "text"
        self._samples.add((old["source"], old["row_index"]))
        loss = self._loss(recorded, again)
        self.losses = self.losses.plus(Losses(1, loss))
        self.counts[f"by_{compared}"] += 1
        ours: Sequence[Any] = recorded.token_ids if recorded.token_ids is not None else recorded.text
        theirs: Sequence[Any] = again.token_ids if by_tokens and again.token_ids is not None else again.text
        reasons = {"recorded_finish_reason": old["finish_reason"], "decoded_finish_reason": new["finish_reason"]}
        if ours == theirs and recorded.text == again.text and old["finish_reason"] == new["finish_reason"]:
            self.counts[EQUAL] += 1
            return
        position = first_difference(ours, theirs)
        difference: dict[str, Any] = {"compared": compared, "position": position, "loss": loss, **reasons}
        if by_tokens and old["retry_index"] == new["retry_index"]:
            difference["retry_index"] = new["retry_index"]
            difference["recorded_token"] = ours[position] if position < len(ours) else None
            difference["decoded_token"] = theirs[position] if position < len(theirs) else None
        self._differ(
            old,
            DIFFERENT,
            **difference,
            decoded_text=again.text,
            decoded_token_ids=list(again.token_ids or ()),
        )

    def _differ(self, old: Mapping[str, Any], outcome: str, **values: Any) -> None:
        self.counts[outcome] += 1
        recorded = {"recorded_text": old["generated_text"], "recorded_token_ids": old["token_ids"]}
        named = {name: old[name] for name in ("sample_id", "source", "row_index")}
        self.differences.append({"outcome": outcome, **named, **recorded, **values})

    def finish(self) -> None:
        """Add a difference for every recorded row without a second result."""
        for index in (index for indices in self._indices.values() for index in indices):
            row = self._recorded.slice(index, 1).to_pylist()[0]
            message = "the second decoding has no row with this id at this place of the source"
            self._differ(row, NOT_COMPARED, error_type="missing", error_message=message)
        self._indices = {}

    def asked(self) -> pa.Table:
        """Return the differing rows whose margins are needed (`actors.margins.ASKED`), at most `MAX_MARGINS`. Margins
        are known by the id, so rows that share one get none and remain different."""
        counts = Counter(row["sample_id"] for row in self.differences)
        rows = [
            {
                "sample_id": row["sample_id"],
                "tokens": row["decoded_token_ids"][: row["position"]],
                "one": row["decoded_token"],
                "other": row["recorded_token"],
                "retry_index": row["retry_index"],
            }
            for row in self.differences
            if None not in (row.get("recorded_token"), row.get("decoded_token")) and counts[row["sample_id"]] == 1
        ]
        return pa.Table.from_pylist(rows[:MAX_MARGINS], ASKED)

    def add_margins(self, margins: pa.Table, tolerance: float | None) -> None:
        """Add margins (`actors.margins.MARGINS`) to the differences; margins within the tolerance make ties.

        `tolerance` replaces the tolerance of the target's dtype.
        """
        known = {row["sample_id"]: row for row in margins.to_pylist()}
        for difference in self.differences:
            if (entry := known.get(difference["sample_id"])) is None:
                continue
            difference["margin"] = entry["margin"]
            difference["tolerance"] = entry["tolerance"] if tolerance is None else tolerance
            if abs(difference["margin"]) <= difference["tolerance"]:
                difference["outcome"] = TIE
                self.counts[DIFFERENT] -= 1
                self.counts[TIE] += 1

    def num_samples(self) -> tuple[int, int]:
        """Return the number of samples that were compared, and of those with a row that is `different`."""
        wrong = {(row["source"], row["row_index"]) for row in self.differences if row["outcome"] == DIFFERENT}
        return len(self._samples), len(wrong)

    def table(self) -> pa.Table:
        """Return the differences as a table of `SCHEMA`, in the order of ids."""
        return pa.Table.from_pylist(sorted(self.differences, key=lambda row: row["sample_id"]), SCHEMA)


def _output(row: Mapping[str, Any]) -> Output:
    tokens = row["token_ids"]
    return Output(row["generated_text"], None if tokens is None else tuple(tokens))


def first_difference(sequence: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ; the length of the shorter one if it begins the other."""
    pairs = enumerate(zip(sequence, other))
    return next((index for index, (left, right) in pairs if left != right), min(len(sequence), len(other)))
