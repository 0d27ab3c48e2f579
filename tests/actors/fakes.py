"""A fake pair and engine without torch, whose texts can be computed by hand."""

from __future__ import annotations

import json
import threading
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

import pyarrow as pa

from configs.schema import CaptionJobConfig
from decoding.stats import EngineStats
from decoding.types import Completion, Request, RequestError, Telemetry
from pipeline.rows.schemas import PROMPT, SPAN, decoded_schema


def text_of(request: Request) -> str:
    """The fake engine's text, which contains the prompt and the sums of the pixels."""
    clips = [(int(clip.frames.sum()), clip.timestamps_s, clip.fps) for clip in request.videos]
    return f"{request.prompt} / {[int(image.sum()) for image in request.images]}" + (f" {clips}" if clips else "")


def num_steps_of(sample_id: str) -> int:
    """Steps of a sample, 1 to 5, from its id."""
    return 1 + zlib.crc32(sample_id.encode()) % 5


class FakeEngine:
    """An engine with slots and waiting requests; each step acquires `gate`, if there is one."""

    def __init__(self, slots: int, gate: threading.Semaphore | None = None) -> None:
        self.slots = slots
        self.gate = gate
        self.stats = EngineStats()
        self.waiting: deque[Request] = deque()
        self.active: dict[int, tuple[Request, int]] = {}
        self.active_ids_per_step: list[tuple[str, ...]] = []
        self.threads: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_free_slots(self) -> int:
        return max(0, self.slots - len(self.active) - len(self.waiting))

    def submit(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        self.waiting.append(request)

    def expect(self, requests: Iterable[Request]) -> None:
        pass

    def step(self) -> list[Completion]:
        if self.gate is not None:
            self.gate.acquire()
        self.threads.add(threading.get_ident())
        for slot in range(self.slots):
            if slot not in self.active and self.waiting:
                request = self.waiting.popleft()
                if "CRASH" in request.prompt:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                self.active[slot] = (request, num_steps_of(request.sample_id))
        self.active_ids_per_step.append(tuple(request.sample_id for request, _ in self.active.values()))
        done = []
        for slot, (request, remaining) in list(self.active.items()):
            if remaining > 1:
                self.active[slot] = (request, remaining - 1)
            else:
                del self.active[slot]
                done.append(self.finish(request))
        return done

    def finish(self, request: Request) -> Completion:
        return complete(request)


def complete(request: Request) -> Completion:
    """The completion of one request: the prefill's token, and 2 tokens per step."""
    if "TOO LONG" in request.prompt:
        error = RequestError("context_too_long", "this prompt is too long")
        return Completion(sample_id=request.sample_id, finish_reason="error", error=error)
    steps = num_steps_of(request.sample_id)
    return Completion(
        sample_id=request.sample_id,
        token_ids=tuple(range(1 + 2 * steps)),
        text=text_of(request),
        mean_logprob=-0.5,
        finish_reason="length" if "ENDLESS" in request.prompt else "stop",
        num_input_tokens=len(request.prompt),
        num_visual_tokens=4 * len(request.images),
        telemetry=Telemetry(
            num_spec_steps=steps,
            num_draft_tokens=3 * steps,
            num_accepted_draft_tokens=steps,
            acceptance_histogram=(0, steps, 0, 0),
            target_forwards=1 + steps,
            drafter_forwards=3 * steps,
            prefill_ms=1.0,
            draft_ms=2.0,
            verify_ms=3.0,
            batch_size_mean=1.5,
            extras={"note": 1},
        ),
    )


class FakePair:
    """Renders messages as lines `role: text`; refuses a conversation with the word REFUSE."""

    target_id = "fake/target"
    drafter_id = "fake/drafter"
    revisions: ClassVar[dict[str, str]] = {"target": "t0", "drafter": "d0"}
    grammar = None

    def __init__(self, gate: threading.Semaphore | None = None) -> None:
        self.gate = gate
        self.engines: list[FakeEngine] = []

    def render(self, messages: list[dict[str, Any]]) -> str:
        lines = []
        for message in messages:
            texts = [part.get("text", f"<{part['type']}>") for part in message["content"]]
            lines.append(f"{message['role']}: {' '.join(texts)}")
        prompt = "\n".join(lines)
        if "REFUSE" in prompt:
            raise ValueError("conversation roles must alternate")
        return prompt

    def engine(self, slots: int) -> FakeEngine:
        self.engines.append(FakeEngine(slots, self.gate))
        return self.engines[-1]

    def plain_engine(self) -> FakeEngine:
        return self.engine(1)


def fake_job(**sections: Any) -> CaptionJobConfig:
    """A valid job whose paths are never opened."""
    data = {
        "source": {"kind": "images", "path": "in"},
        "prompt": {"text": "Describe."},
        "model": {"target": {"path": "target"}, "drafter": {"path": "drafter"}},
        "method": {"drafter": {"kind": "model"}},
        "pool": {"slots": 4, "batch_rows": 8},
        "sink": {"path": "out"},
        **sections,
    }
    return CaptionJobConfig.model_validate_json(json.dumps(data))


def decoded_table(rows: list[dict[str, Any]], keep: tuple[pa.Field, ...] = ()) -> pa.Table:
    """A table of the stage `decoded`; a row has `id`, `text`, `grey` (of a 2×3 image), `error` and kept values."""
    columns: dict[str, list[Any]] = {field.name: [] for field in decoded_schema(keep)}
    for index, row in enumerate(rows):
        error = row.get("error", "")
        grey = row.get("grey")
        image = [] if grey is None or error else [{"height": 2, "width": 3, "rgb": bytes([grey] * 18)}]
        shown = [{"type": "image"}] * len(image) + [{"type": "video"}] * len(row.get("videos", []))
        content = [*shown, {"type": "text", "text": row.get("text", "Describe.")}]
        columns["sample_id"].append(row["id"])
        columns["source"].append("shard-0")
        columns["row_index"].append(row.get("row_index", index))
        columns["images"].append(image)
        columns["videos"].append(row.get("videos", []))
        columns["packed_inputs"].append(None)
        for name, _ in (*SPAN, *PROMPT):
            columns[name].append(row.get(name, "" if name == "partial_video" else None))
        columns["sampling"].append(row.get("sampling", ""))
        columns["messages"].append("" if error else json.dumps([{"role": "user", "content": content}]))
        columns["error_type"].append(error)
        columns["error_message"].append(f"about {error}" if error else "")
        for field in keep:
            columns[field.name].append(row.get(field.name))
    return pa.table(columns, schema=decoded_schema(keep))
