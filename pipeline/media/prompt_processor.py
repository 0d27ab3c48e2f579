"""Runs the target's processor in decoding tasks: renders prompts and packs the processor's outputs for the actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.generate import render_prompt
from actors.results import RowRefused
from actors.serving.watchdog import Watchdog
from configs.schema import CaptionJobConfig
from decoding.errors import PROMPT_REFUSED
from models.inputs.clip import Clip
from pipeline.media.row_weights import share_of
from pipeline.media.video.worker import DecodedClip
from pipeline.prompts.templates import whole_text
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError

if TYPE_CHECKING:
    from models.inputs.output_size import OutputSizes
    from models.inputs.packing import Packed, PackedInputs
    from models.inputs.processing import FrontEnd

CHUNK_BYTES = 8 * 1024**2
"""Bytes of outputs that are copied to Arrow together."""
MAX_UNPACKED_SHARE = 0.5
"""Largest part of a share (`row_weights.share_of`) that a processor's outputs may take before they are packed. Its
intermediate arrays take up to three times as much, and Ray's copy of the block does not exist yet."""


@dataclass(frozen=True)
class ProcessedPrompt:
    """A rendered prompt and its packed processor outputs."""

    prompt: str
    inputs: PackedInputs


@dataclass(frozen=True)
class PromptProcessor:
    """Processes the prompts of rows in a task; small when pickled.

    `fetch` returns the processor, which each process loads once per `key`. `keeps_pixels` is whether images and
    videos travel beside the outputs. `sizes` estimates outputs. A sample whose outputs would exceed the weight that
    `Weigher` gave it, or `MAX_UNPACKED_SHARE` before packing, travels as pixels instead, and the actor's process runs
    the processor. `share_bytes` and `batch_rows` are those of the `Weigher`.
    """

    fetch: Callable[[], Any]
    key: str
    keeps_pixels: bool
    sizes: OutputSizes
    share_bytes: int
    batch_rows: int
    max_call_s: float | None
    num_threads: int
    template_options: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, config: CaptionJobConfig, fetch: Callable[[], Any], key: str, keeps_pixels: bool, sizes: OutputSizes
    ) -> PromptProcessor:
        """Build the processor of a job."""
        pool, share_bytes = config.pool, share_of(config.source.max_decoded_bytes)
        num_threads = max(1, int(pool.decode_cpus))
        limits = (share_bytes, pool.rows_per_batch, pool.max_step_s, num_threads)
        return cls(fetch, key, keeps_pixels, sizes, *limits, config.template_options)

    def process(
        self,
        conversations: Sequence[Sequence[dict[str, Any]]],
        images: Sequence[NDArray[np.uint8]],
        videos: Sequence[DecodedClip],
        is_cut: bool = False,
    ) -> list[ProcessedPrompt | RowError] | None:
        """Return the processed prompts of one sample, each a conversation about the same images (height, width, 3) and
        videos, or its error `prompt_refused`; None if the outputs would be too large: larger than the pixels if
        the sample `is_cut` from a video, whose clips form one block.

        The process ends if one call takes longer than `max_call_s`.
        """
        decoded = [image.nbytes for image in images], [len(video.rgb) for video in videos]
        if self.sizes.unpacked_bytes(*decoded) > MAX_UNPACKED_SHARE * self.share_bytes:
            return None
        front_end, watchdog = self._loaded(), Watchdog(self.max_call_s)
        clips = [_clip(video) for video in videos]
        processed: list[ProcessedPrompt | RowError] = []
        try:
            for messages in conversations:
                watchdog.watch()
                processed.append(_processed(front_end, messages, images, clips))
        finally:
            watchdog.rest()
        processed = _shared(processed)
        return processed if num_new_bytes(processed) <= self._limit(*decoded, len(conversations), is_cut) else None

    def _limit(self, images: Sequence[int], videos: Sequence[int], num_prompts: int, is_cut: bool) -> int:
        """Return the bytes that outputs of media of these decoded bytes may take, as `Weigher` assumes."""
        num_bytes = sum(images) + sum(videos)
        if is_cut:
            return num_bytes
        estimated, lightest = self.sizes.packed_bytes(images, videos, num_prompts), self.share_bytes // self.batch_rows
        if self.keeps_pixels:
            return min(max(estimated, lightest - num_bytes), self.share_bytes - num_bytes)
        return min(max(estimated, lightest, num_bytes), self.share_bytes)

    def _loaded(self) -> FrontEnd:
        """Return this process's front end, loaded at the first call."""
        if self.key not in _front_ends:
            import torch
            from transformers.utils.logging import disable_progress_bar

            from models.inputs.processing import FrontEnd

            disable_progress_bar()
            torch.set_num_threads(self.num_threads)
            _front_ends.clear()
            _front_ends[self.key] = FrontEnd(self.fetch())
            _front_ends[self.key].template_options = self.template_options or {}
        return _front_ends[self.key]


_front_ends: dict[str, FrontEnd] = {}


def _processed(
    front_end: FrontEnd, messages: Sequence[dict[str, Any]], images: Sequence[NDArray[np.uint8]], clips: Sequence[Clip]
) -> ProcessedPrompt | RowError:
    from models.inputs.processing import PromptError

    try:
        prompt = render_prompt(front_end.render, messages)
        return ProcessedPrompt(prompt, front_end.pack(prompt, images, clips))
    except (PromptError, RowRefused) as error:
        return RowError(PROMPT_REFUSED, whole_text(str(error)))


def _shared(prompts: Sequence[ProcessedPrompt | RowError]) -> list[ProcessedPrompt | RowError]:
    """Make equal tensors of a sample's prompts one object, that of the first processed prompt."""
    first = next((prompt for prompt in prompts if isinstance(prompt, ProcessedPrompt)), None)
    shared: list[ProcessedPrompt | RowError] = []
    for prompt in prompts:
        if isinstance(prompt, ProcessedPrompt) and first is not None:
            known = first.inputs.tensors
            tensors = {name: _same(value, known.get(name)) for name, value in prompt.inputs.tensors.items()}
            shared.append(replace(prompt, inputs=replace(prompt.inputs, tensors=tensors)))
        else:
            shared.append(prompt)
    return shared


def _same(value: Packed, known: Packed | None) -> Packed:
    if known is None or (value.dtype, value.shape, len(value.arrays)) != (known.dtype, known.shape, len(known.arrays)):
        return value
    pairs = zip(value.arrays, known.arrays, strict=True)
    return known if all(new.dtype == old.dtype and np.array_equal(new, old) for new, old in pairs) else value


def num_new_bytes(prompts: Sequence[ProcessedPrompt | RowError]) -> int:
    """Return the bytes of the prompts' tensors; shared ones count once."""
    groups = [prompt.inputs.tensors.values() for prompt in prompts if isinstance(prompt, ProcessedPrompt)]
    return sum(tensor.num_bytes for tensor in {id(tensor): tensor for tensors in groups for tensor in tensors}.values())


def _clip(video: DecodedClip) -> Clip:
    frames = np.frombuffer(video.rgb, np.uint8).reshape(video.num_frames, video.height, video.width, 3)
    return Clip(frames, tuple(video.timestamps_s), video.fps)


class InputColumn:
    """Builds the Arrow column of processed prompts (`schemas.PACKED_INPUTS`) row by row, in chunks of about
    `CHUNK_BYTES`."""

    def __init__(self) -> None:
        self._chunks: list[pa.Array] = []
        self._rows: list[dict[str, Any] | None] = []
        self._num_bytes = 0

    def add(self, prompt: ProcessedPrompt | None, holder: ProcessedPrompt | None = None) -> None:
        """Add a row; null without a prompt. Tensors that are also those of `holder`, the sample's first row with
        outputs, are stored as null."""
        if prompt is None:
            self._rows.append(None)
            return
        inputs = prompt.inputs
        holder_tensors = {} if holder is None else holder.inputs.tensors
        tensors = [_stored(name, tensor, holder_tensors.get(name) is tensor) for name, tensor in inputs.tensors.items()]
        self._rows.append(
            {
                "prompt": whole_text(prompt.prompt),
                "num_images": inputs.num_images,
                "num_frames": list(inputs.num_frames),
                "tensors": tensors,
            }
        )
        self._num_bytes += sum(len(tensor[part] or b"") for tensor in tensors for part in ("data", "levels"))
        if self._num_bytes >= CHUNK_BYTES:
            self._close()

    def finish(self) -> pa.ChunkedArray:
        self._close()
        return pa.chunked_array(self._chunks, schemas.PACKED_INPUTS)

    def _close(self) -> None:
        if self._rows:
            self._chunks.append(pa.array(self._rows, schemas.PACKED_INPUTS))
        self._rows, self._num_bytes = [], 0


def _stored(name: str, tensor: Packed, is_held: bool) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "stored_dtype": str(tensor.data.dtype),
        "stored_shape": list(tensor.data.shape),
        "data": None if is_held else tensor.data.tobytes(),
        "levels": None if is_held or tensor.levels is None else tensor.levels.tobytes(),
    }
