"""A fake image pair, engine and painter without torch, whose codes and pixels can be computed by hand."""

from __future__ import annotations

import json
import threading
import zlib
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.results import RowRefused
from configs.synthesis import SynthesizeJobConfig
from decoding.types import Completion, Request, RequestError, Telemetry
from pipeline.synthesis.rows import prepared_schema
from tests.actors.fakes import FakeEngine, num_steps_of

NUM_TOKENS = 4
SIDE_PX = 2


def codes_of(request: Request) -> tuple[int, ...]:
    """The fake engine's codes, which contain the sample's noise key and its condition."""
    condition = request.condition
    result = -1 if condition is None else condition if isinstance(condition, int) else round(float(condition.sum()))
    return (request.seed % 1000, request.replica, zlib.crc32(request.sample_id.encode()) % 1000, result)


class FakeImageEngine(FakeEngine):
    """Draws `NUM_TOKENS` codes; prompts with the word NAN fail."""

    def finish(self, request: Request) -> Completion:
        if "NAN" in request.prompt:
            error = RequestError("non_finite_logits", "the target's logits are not finite")
            return Completion(request.sample_id, finish_reason="error", error=error)
        steps = num_steps_of(request.sample_id)
        result = Telemetry(num_spec_steps=steps, num_accepted_draft_tokens=1, target_forwards=1 + steps)
        return Completion(request.sample_id, codes_of(request), telemetry=result, num_input_tokens=3, mean_logprob=-2.0)


class FakeImagePair:
    """Encodes a prompt as its length, once per word; refuses prompts with the word REFUSE."""

    target_id = "fake/llamagen"
    drafter_id = ""
    revisions: ClassVar[dict[str, str]] = {"target": "t0"}
    num_image_tokens = NUM_TOKENS

    def __init__(self, gate: threading.Semaphore | None = None) -> None:
        self.gate = gate
        self.engines: list[FakeImageEngine] = []
        self.encoded: list[str] = []
        self.threads: set[int] = set()

    def encode(self, prompt: str) -> NDArray[np.float32]:
        self.encoded.append(prompt)
        self.threads.add(threading.get_ident())
        if "REFUSE" in prompt:
            raise RowRefused("prompt_too_long", "the prompt has 200 tokens")
        return np.full((len(prompt.split()), 1), len(prompt), np.float32)

    def engine(self, slots: int) -> FakeImageEngine:
        self.engines.append(FakeImageEngine(slots, self.gate))
        return self.engines[-1]

    def plain_engine(self) -> FakeImageEngine:
        return self.engine(1)


class FakePainter:
    """Paints every image in the grey of its first code; code 13 gives no finite pixels. Records its batches."""

    def __init__(self) -> None:
        self.batches: list[NDArray[np.int32]] = []

    def paint(self, codes: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        self.batches.append(codes)
        grey = (codes[:, 0] % 256).astype(np.uint8)
        return np.broadcast_to(grey[:, None, None, None], (len(codes), SIDE_PX, SIDE_PX, 3)), codes[:, 0] != 13


def image_job(**sections: Any) -> SynthesizeJobConfig:
    """A valid job whose paths are never opened."""
    data = {
        "source": {"kind": "text", "path": "in"},
        "prompt": "{text}",
        "model": {"target": {"path": "target"}, "vq": {"path": "vq"}, "condition": {"path": "t5"}},
        "pool": {"slots": 4, "batch_rows": 8},
        "vq": {"batch_rows": 4},
        "sink": {"path": "out"},
        **sections,
    }
    return SynthesizeJobConfig.model_validate_json(json.dumps(data))


def prepared_table(rows: list[dict[str, Any]], keep: tuple[pa.Field, ...] = ()) -> pa.Table:
    """A table of the stage `prepared`; a row has `id`, `prompt`, `features` or `label`, `error` and other values."""
    defaults = {"seed": 7, "temperature": 1.0, "top_k": 5, "top_p": 1.0, "guidance_scale": 2.0}
    names = prepared_schema(keep).names
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for index, row in enumerate(rows):
        features = row.get("features")
        results = {"num_tokens": len(features), "values": np.asarray(features, "<f4").tobytes()} if features else None
        error = row.get("error", "")
        values = {
            **defaults,
            "prompt": "",
            **row,
            "sample_id": row["id"],
            "source": "shard-0",
            "row_index": index,
            "features": results,
            "error_type": error,
            "error_message": f"about {error}" if error else "",
        }
        for name in names:
            columns[name].append(values.get(name))
    return pa.table(columns, schema=prepared_schema(keep))
