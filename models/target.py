"""Run any transformers vision-language or text model as a target or a drafter."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.backends.select import cuda_devices, resolve_device
from models.contract import Condition, TargetModel
from models.forward_check import prove
from models.inputs.clip import Clip
from models.inputs.content import Content
from models.inputs.features import MediaPrompt, VisualFeatures
from models.inputs.packing import PackedInputs
from models.inputs.prefix import Prefix, capture
from models.inputs.processing import FrontEnd, PromptError
from models.inputs.prompt_prefetch import PreparedPrompt, Prompt
from models.inputs.vision import MAX_PATCHES, num_patches, patch_px
from models.loading.adapters import read_adapter
from models.loading.checkpoints import CheckpointError, CheckpointRef, load_weights, read_config, read_processor
from models.loading.inspection import check_decoder, parts_of
from models.loading.placement import num_bytes

logger = logging.getLogger(__name__)

TIMES = ("second_per_grid_ts",)
"""Names of processor outputs in seconds."""
WRITES_TEXTS = "this model writes texts: it takes no class label and no ready features"


@dataclass(frozen=True, eq=False)
class _Processed:
    """A prompt's processor outputs on the device, or the error of the processor; `num_patches` is 0 without media."""

    content: Content
    inputs: dict[str, Tensor]
    error: PromptError | None
    num_patches: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.inputs["input_ids"].shape[1]) if self.inputs else 0


class Target(TargetModel):
    """A transformers model with its front end.

    `eos_ids` are the tokens that end a text. `visual_ids` are the placeholder tokens that image and video features
    replace, and `video_id` is the placeholder of videos. `vocab_size` is the width of the logits, which may exceed the
    tokenizer's vocabulary. `reads_inputs` is whether processor outputs of a request are those of this front end.
    """

    reads_inputs = True

    def __init__(
        self, model: nn.Module, front_end: FrontEnd, name: str = "", max_context_tokens: int | None = None
    ) -> None:
        self.model, self.front_end, self.name = model, front_end, name
        label = name or type(model).__name__
        self.decoder, embedding = parts_of(model, label)
        self.head, self.max_context_tokens = check_decoder(model, self.decoder, embedding, label, max_context_tokens)
        weight = next(self.decoder.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size, self.hidden_size = map(int, self.head.weight.shape)  # type: ignore[arg-type]
        self.eos_ids = _eos_ids(model, front_end)
        self.video_id: int | None = getattr(model.config, "video_token_id", None)
        visual_ids = (getattr(model.config, "image_token_id", None), self.video_id)
        self.visual_ids = frozenset(int(i) for i in visual_ids if i is not None)
        prove(model, self.decoder, self.head, front_end, self.visual_ids, label, max_context_tokens)
        self._features = VisualFeatures(model, label)
        self._patch_px = patch_px(model.config)
        self._held: dict[Content, PreparedPrompt | PromptError] = {}
        special = getattr(front_end.tokenizer, "all_special_ids", None) or []
        self.special_ids = self.eos_ids | self.visual_ids | frozenset(int(i) for i in special)

    @classmethod
    def load(
        cls,
        ref: CheckpointRef,
        dtype: str = "auto",
        device: str = "auto",
        num_devices: int = 1,
        reserved_bytes: int = 0,
        quantization: str = "none",
        max_context_tokens: int | None = None,
        adapter: str | None = None,
    ) -> Target:
        """Load a checkpoint onto `device`, or onto the first `num_devices` CUDA devices if `num_devices` > 1.

        Of the first one, `reserved_bytes` are used by other models. No context is longer than `max_context_tokens`.
        The LoRA adapter in the folder `adapter` is merged into the weights.
        Raises: CheckpointError if fewer are visible.
        """
        first_device = resolve_device(device)
        others: list[torch.device] = []
        if num_devices > 1:
            devices = cuda_devices(num_devices)
            if len(devices) < num_devices:
                raise CheckpointError(f"{ref.path}: {num_devices} GPUs are configured, and {len(devices)} are visible")
            first_device, *others = devices
        config = read_config(ref)
        front_end = FrontEnd(read_processor(ref, config))
        merge = None if adapter is None else read_adapter(adapter).merge
        model = load_weights(ref, config, dtype, first_device, others, reserved_bytes, quantization, merge)
        return cls(model, front_end, ref.path, max_context_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return num_bytes(self.model)

    @property
    def num_feature_hits(self) -> int:
        return self._features.num_hits

    def share_front_end(self, other: Target, max_bytes: int) -> None:
        """Use `other`'s front end, with a cache of `max_bytes`, if it encodes all prompts in the same way; else ignore
        the processor outputs of requests, which are `other`'s."""
        self.reads_inputs = other.front_end.reads_like(self.front_end)
        if self.reads_inputs:
            self.front_end = other.front_end
            self.front_end.keep(max_bytes)
        else:
            self.front_end.follow(other.front_end)

    def keep_features(self, max_bytes: int) -> None:
        """Cache visual features of prompts from now on, up to `max_bytes`; 0 disables the cache."""
        self._features.keep(max_bytes)

    def prefix(self, inputs: dict[str, Tensor]) -> Prefix:
        """Embed processor outputs of one sample, on the model's device; raises PromptError if the model raises."""
        return self._captured(self._placed(inputs), self.model)

    def _placed(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            # Seconds stay in fp32: rounding to half precision would change the frames' rotary positions.
            name: value.to(self.device, self.dtype if value.is_floating_point() and name not in TIMES else None)
            for name, value in inputs.items()
        }

    def _captured(self, placed: dict[str, Tensor], model: nn.Module) -> Prefix:
        try:
            with torch.inference_mode():
                return capture(model, self.decoder, placed, self.visual_ids)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (ValueError, IndexError, RuntimeError) as error:  # fail the row, not the job
            raise PromptError(f"the model refuses the prompt: {error}") from error

    def process(
        self,
        prompt: str,
        images: Sequence[NDArray[np.uint8]],
        videos: Sequence[Clip] = (),
        inputs: PackedInputs | None = None,
    ) -> dict[str, Tensor]:
        """Return the processor's outputs for a rendered prompt: unpacked `inputs` on this model's device if they are of
        this front end, else those of `FrontEnd.encode`, on the CPU, with its errors."""
        if inputs is not None and self.reads_inputs:
            return inputs.unpack(self.device)
        if inputs is not None and (len(images), len(videos)) != (inputs.num_images, len(inputs.num_frames)):
            raise RuntimeError(f"{self.name}: the request lacks the images and videos that this front end needs")
        return self.front_end.encode(prompt, images, videos)

    def encode(
        self,
        prompt: str,
        images: Sequence[NDArray[np.uint8]],
        videos: Sequence[Clip] = (),
        inputs: PackedInputs | None = None,
    ) -> Prefix:
        """Encode a rendered prompt with its images and clips; raises the errors of `process` and `prefix`."""
        alone = Prompt(prompt, tuple(images), tuple(videos), inputs)
        encoded = self._held.get(alone.content) if self._held else None
        if encoded is None:
            [encoded] = self.encode_prompts([alone])
        if isinstance(encoded, PromptError):
            raise encoded
        return encoded.lanes[0]

    def encode_prompts(
        self, prompts: Iterable[Prompt], max_tokens: int | None = None
    ) -> Iterator[PreparedPrompt | PromptError]:
        """See `TargetModel.encode_prompts`. Images and videos of at most `MAX_PATCHES` patches run together."""
        group: list[_Processed] = []
        contents: set[Content] = set()
        group_patches = total_tokens = 0
        for prompt in prompts:
            processed = self._processed(prompt)
            content, patches = processed.content, processed.num_patches
            if content in contents or (patches and self._features.has(content)):
                patches = 0
            if group_patches and group_patches + patches > MAX_PATCHES:
                yield from self._embedded(group)
                group, contents, group_patches = [], set(), 0
            group.append(processed)
            if processed.num_patches:
                contents.add(content)
            group_patches += patches
            total_tokens += processed.num_tokens
            if not group_patches:  # it waits for no other images
                yield from self._embedded(group)
                group, contents = [], set()
            if max_tokens is not None and total_tokens >= max_tokens:
                break
        yield from self._embedded(group)

    @contextmanager
    def encoded_ahead(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Encode `prompts` together; within the block, `encode` returns or raises the results."""
        distinct = {prompt.content: prompt for prompt in prompts}
        try:
            for content, encoded in zip(distinct, self.encode_prompts(distinct.values()), strict=True):
                self._held[content] = encoded
        except torch.AcceleratorError:
            raise
        except Exception as error:
            logger.info("%s: the other prompts are encoded one by one (%s)", self.name, error)
        try:
            yield
        finally:
            self._held = {}

    def _processed(self, prompt: Prompt) -> _Processed:
        """Run the processor and move its outputs to the device."""
        packed = prompt.inputs if self.reads_inputs else None
        content = Content.shown(prompt.images, prompt.videos) if packed is None else packed.content()
        has_media = bool(prompt.images or prompt.videos) if packed is None else packed.has_media
        try:
            if prompt.condition is not None:
                raise PromptError(WRITES_TEXTS)
            inputs = self._placed(self.process(prompt.prompt, prompt.images, prompt.videos, prompt.inputs))
        except PromptError as error:
            return _Processed(content, {}, error)
        return _Processed(content, inputs, None, max(1, num_patches(inputs, self._patch_px)) if has_media else 0)

    def _embedded(self, group: list[_Processed]) -> list[PreparedPrompt | PromptError]:
        """Embed processed prompts, those with images or videos together."""
        media = {
            index: MediaPrompt(prompt.content, partial(self._captured, prompt.inputs))
            for index, prompt in enumerate(group)
            if prompt.num_patches
        }
        prefixes = dict(zip(media, self._features.embed(list(media.values())), strict=True))
        encoded: list[PreparedPrompt | PromptError] = []
        for index, prompt in enumerate(group):
            try:
                prefix = prompt.error or prefixes.get(index) or self._captured(prompt.inputs, self.model)
            except PromptError as error:
                prefix = PromptError(str(error))  # without a traceback, which would keep tensors alive
            if isinstance(prefix, Prefix):
                num_hits = media[index].num_hits if index in media else 0
                encoded.append(PreparedPrompt([prefix.of(prompt.content)], num_hits))
            else:
                encoded.append(prefix)
        return encoded

    def encode_lanes(
        self,
        prompt: str,
        images: Sequence[NDArray[np.uint8]],
        condition: Condition,
        videos: Sequence[Clip] = (),
        inputs: PackedInputs | None = None,
    ) -> list[Prefix]:
        if condition is not None:
            raise PromptError(WRITES_TEXTS)
        return [self.encode(prompt, images, videos, inputs)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.front_end.decode(token_ids)


def _eos_ids(model: nn.Module, front_end: FrontEnd) -> frozenset[int]:
    """Return the end-of-text ids, from the generation config first, as transformers' `generate` does."""
    generation: Any = getattr(model, "generation_config", None)
    for owner in (generation, model.config.get_text_config(), front_end.tokenizer):  # type: ignore[union-attr,operator]
        if (ids := getattr(owner, "eos_token_id", None)) is not None:
            return frozenset(int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids]))
    return frozenset()
