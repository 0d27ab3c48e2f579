"""Maps decoded rows to margins between two tokens at the first position where two outputs differ."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pyarrow as pa

from actors.generate import Generate
from actors.serving.crash_ledger import row_keys

ASKED = pa.schema(
    [
        *(("sample_id", pa.string()), ("tokens", pa.list_(pa.int32())), ("one", pa.int32()), ("other", pa.int32())),
        ("retry_index", pa.int32()),
    ]
)
"""Rows to compute margins of: the output before the position, two tokens at it (`decoding.margins.margin`), and the
number of the further attempt that made the row, null without any."""
MARGINS = pa.schema([("sample_id", pa.string()), ("margin", pa.float64()), ("tolerance", pa.float64())])


class Margins(Generate):
    """Maps rows of the stage `decoded` to MARGINS tables, one forward per asked row. Rows that are not asked, or cannot
    run, are left out."""

    def __init__(self, *arguments: Any, asked: Callable[[], pa.Table], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked = {row["sample_id"]: row for row in asked().to_pylist()}
        self._lock = threading.Lock()

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Compute the margins of one table and yield one MARGINS table."""
        table = self._inputs(table)
        keys = row_keys(table)
        deaths = await asyncio.to_thread(self._ledger.begin, keys)
        result = await asyncio.to_thread(self._margins, table, keys, deaths)
        await asyncio.to_thread(self._ledger.end, keys, result.num_rows, {})
        yield result

    def _margins(self, table: pa.Table, keys: list[str], deaths: list[int]) -> pa.Table:
        from decoding.margins import margin  # imports torch, inside the actor's process
        from models.inputs.processing import PromptError

        rows = []
        requests, _ = self._requests(table, keys, deaths)
        for request in requests.values():
            asked = self._asked.get(request.sample_id)
            if asked is None:  # another prompt or clip of the sample
                continue
            try:
                request = self.again(request, asked["retry_index"] or 0)
                with self._lock:  # forwards of concurrent batches share the device
                    result = margin(self._pair.target, request, asked["tokens"], asked["one"], asked["other"])
            except PromptError:
                continue
            rows.append({"sample_id": request.sample_id, "margin": result.value, "tolerance": result.tolerance})
        return pa.Table.from_pylist(rows, MARGINS)
