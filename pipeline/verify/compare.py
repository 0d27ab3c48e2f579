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
from pipeline.verify.rows import RECORDED

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
        self._places: dict[tuple[Any, ...], list[int]] = {}
        for place, row in enumerate(recorded.select(list(KEY)).to_pylist()):
            self._places.setdefault(tuple(row.values()), []).append(place)
        self._loss = loss
        self.losses = Losses()
        self.differences: list[dict[str, Any]] = []
        self.counts = Counter[str]()
        self._samples: set[tuple[str, int]] = set()

    def add(self, results: pa.Table) -> None:
        """Compare a table of results, of which rows without a recorded result are ignored."""
        for row in results.select([*RECORDED.names, "error_type", "error_message"]).to_pylist():
            # Without a place it is another prompt or clip of a chosen sample, which failed in the job.
            for place in self._places.pop(tuple(row[name] for name in KEY), ()):
                self._compare(self._recorded.slice(place, 1).to_pylist()[0], row)

    def _compare(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        if new["error_type"]:
            self._differ(old, NOT_COMPARED, error_type=new["error_type"], error_message=new["error_message"])
            return
        own, again = _output(old), _output(new)
        by_tokens = own.token_ids is not None
        compared = "tokens" if by_tokens else "text"
        self._samples.add((old["source"], old["row_index"]))
        loss = self._loss(own, again)
        self.losses = self.losses.plus(Losses(1, loss))
        self.counts[f"by_{compared}"] += 1
        ours: Sequence[Any] = own.token_ids if own.token_ids is not None else own.text
        theirs: Sequence[Any] = again.token_ids if by_tokens and again.token_ids is not None else again.text
        reasons = {"recorded_finish_reason": old["finish_reason"], "decoded_finish_reason": new["finish_reason"]}
        if ours == theirs and own.text == again.text and old["finish_reason"] == new["finish_reason"]:
            self.counts[EQUAL] += 1
            return
        position = first_difference(ours, theirs)
        found: dict[str, Any] = {"compared": compared, "position": position, "loss": loss, **reasons}
        if by_tokens:
            found["recorded_token"] = ours[position] if position < len(ours) else None
            found["decoded_token"] = theirs[position] if position < len(theirs) else None
        self._differ(
            old,
            DIFFERENT,
            **found,
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
        for place in (place for places in self._places.values() for place in places):
            row = self._recorded.slice(place, 1).to_pylist()[0]
            message = "the second decoding has no row with this id at this place of the source"
            self._differ(row, NOT_COMPARED, error_type="missing", error_message=message)
        self._places = {}

    def asked(self) -> pa.Table:
        """Return the differing rows whose margins are needed (`actors.margins.ASKED`), at most `MAX_MARGINS`. Margins
        are known by the id, so rows that share one get none and remain different."""
        counts = Counter(one["sample_id"] for one in self.differences)
        rows = [
            {
                "sample_id": one["sample_id"],
                "tokens": one["decoded_token_ids"][: one["position"]],
                "one": one["decoded_token"],
                "other": one["recorded_token"],
            }
            for one in self.differences
            if None not in (one.get("recorded_token"), one.get("decoded_token")) and counts[one["sample_id"]] == 1
        ]
        return pa.Table.from_pylist(rows[:MAX_MARGINS], ASKED)

    def add_margins(self, margins: pa.Table, tolerance: float | None) -> None:
        """Add margins (`actors.margins.MARGINS`) to the differences; margins within the tolerance make ties.

        `tolerance` replaces the tolerance of the target's dtype.
        """
        known = {row["sample_id"]: row for row in margins.to_pylist()}
        for one in self.differences:
            if (found := known.get(one["sample_id"])) is None:
                continue
            one["margin"] = found["margin"]
            one["tolerance"] = found["tolerance"] if tolerance is None else tolerance
            if abs(one["margin"]) <= one["tolerance"]:
                one["outcome"] = TIE
                self.counts[DIFFERENT] -= 1
                self.counts[TIE] += 1

    def num_samples(self) -> tuple[int, int]:
        """Return the number of samples that were compared, and of those with a row that is `different`."""
        wrong = {(one["source"], one["row_index"]) for one in self.differences if one["outcome"] == DIFFERENT}
        return len(self._samples), len(wrong)

    def table(self) -> pa.Table:
        """Return the differences as a table of `SCHEMA`, in the order of ids."""
        return pa.Table.from_pylist(sorted(self.differences, key=lambda one: one["sample_id"]), SCHEMA)


def _output(row: Mapping[str, Any]) -> Output:
    tokens = row["token_ids"]
    return Output(row["generated_text"], None if tokens is None else tuple(tokens))


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ; the length of the shorter one if it begins the other."""
    pairs = enumerate(zip(one, other))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
