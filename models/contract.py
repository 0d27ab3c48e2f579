"""The interface between the engine and models: prompts become prefixes, prefixes get lanes.

`models.target` implements it for text models, `models.llamagen.target` for image models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.backends.base import Backend
from models.backends.forward import DecoderRunner
from models.backends.select import backend_for
from models.inputs.clip import Clip
from models.inputs.prefix import Prefix
from models.inputs.prompt_prefetch import PromptThread
from models.kv.lanes import LaneModel

Condition = NDArray[np.float32] | int | None
"""Input of an image model instead of the prompt: text features (L, D), or a class label."""


class TargetModel:
    """A decoder with its output layer and front end, as a target or a drafter; subclasses set the attributes.

    `num_lanes` rows hold one sample: two for classifier-free guidance, the conditional one first. `eos_ids` end an
    output; they are empty if its length is fixed, and `max_new_tokens` is then that length, None otherwise.
    `num_feature_hits` counts visual features from the cache. `prompt_thread` encodes prompts while steps run; None
    without prefetch.
    """

    name: str
    num_lanes: int = 1
    max_new_tokens: int | None = None
    decoder: nn.Module
    head: nn.Module
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    prompt_thread: PromptThread | None = None
    _run: DecoderRunner | None = None

    def encode_lanes(
        self,
        prompt: str,
        images: Sequence[NDArray[np.uint8]],
        condition: Condition,
        videos: Sequence[Clip] = (),
    ) -> list[Prefix]:
        """One sample's prompt for each lane, on the model's device."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids → text without special tokens; empty for tokens of images."""
        raise NotImplementedError

    @property
    def num_feature_hits(self) -> int:
        return 0

    @property
    def backend(self) -> Backend:
        return backend_for(self.device)

    def lanes(self, num_slots: int, num_lanes: int, capacity: int) -> LaneModel:
        """A KV cache for `num_slots` samples of `num_lanes` rows and `capacity` positions, with the model over it."""
        head = self.head if self._run is None else self._run.output_layer(self.head)
        return LaneModel(self.decoder, head, num_slots, num_lanes, capacity, self._run)

    def compile(self) -> bool:
        """Compile every kind of forward at its first use from now on; returns whether this model is compiled."""
        if self._run is None:
            self._run = self.backend.compile(self.decoder)
        return self._run is not None and self._run.is_compiled

    def capture(self) -> bool:
        """Replay captured steps from now on; returns whether this model is captured."""
        if self._run is None:
            self._run = self.backend.capture(self.decoder)
        return self._run is not None and not self._run.is_compiled

    @property
    def kernels(self) -> str:
        """The kernel path of this model's forwards: dtype, processor, mode and torch version."""
        weight = next(self.decoder.parameters())
        mode = "eager" if self._run is None else self._run.mode
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"{dtype}, {self.backend.describe(weight.device)}, {mode}, torch {torch.__version__}"

    def prefetch_prompts(self) -> None:
        """Prepare prompts on a thread from now on; engines that exist already do without."""
        self.prompt_thread = self.prompt_thread or PromptThread(self.backend.side_stream(self.device))
