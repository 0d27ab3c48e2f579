"""The interface between the engine and models: models encode prompts as prefixes and run forwards over a KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.backends.attention import DecoderRunner
from models.backends.base import Backend
from models.backends.select import backend_for
from models.inputs.clip import Clip
from models.inputs.content import ConditionPair
from models.inputs.packing import PackedInputs
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.inputs.prompt_prefetch import PreparedPrompt, Prompt, PromptThread
from models.kv.feature_layers import LAST
from models.kv.lanes import LaneModel

Condition = NDArray[np.float32] | ConditionPair | int | None
"""Text features (L, D), also with those of a negative prompt, or a class label; an image model takes it instead of the
prompt."""


class TargetModel(ABC):
    """A decoder with its output layer and front end, as a target or a drafter; subclasses set the attributes.

    `num_lanes` is the number of KV cache rows of one sample: two for classifier-free guidance, the conditional row
    first. `eos_ids` are the tokens that end an output. If the output length is fixed, `eos_ids` is empty and
    `max_new_tokens` is that length; otherwise `max_new_tokens` is None. `grid` is the number of codes in a row of an
    image, None for texts. `max_context_tokens` is the longest context for which the model was checked at load time,
    None if any. `prompt_thread` encodes prompts while steps run; it is None without prefetch.
    """

    name: str
    num_lanes: int = 1
    max_new_tokens: int | None = None
    max_context_tokens: int | None = None
    grid: int | None = None
    decoder: nn.Module
    head: nn.Module
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    mtp: nn.Module | None = None
    """The MTP layer of the target's checkpoint (`models.heads.mtp`), loaded for the drafter `mtp`; else None."""
    prompt_thread: PromptThread | None = None
    _run: DecoderRunner | None = None

    @abstractmethod
    def encode_lanes(
        self,
        prompt: str,
        images: Sequence[NDArray[np.uint8]],
        condition: Condition,
        videos: Sequence[Clip] = (),
        inputs: PackedInputs | None = None,
    ) -> list[Prefix]:
        """Encode one sample's prompt; returns one prefix for each lane, on the model's device. `inputs` are processor
        outputs, see `decoding.types.Request`."""

    def encode_prompts(
        self, prompts: Iterable[Prompt], max_tokens: int | None = None
    ) -> Iterator[PreparedPrompt | PromptError]:
        """Yield each prompt encoded, or its error, in order; images of several prompts may run together.

        Prompts are taken one by one, and no more once those taken have `max_tokens` tokens.
        """
        total_tokens = 0
        for prompt in prompts:
            try:
                lanes = self.encode_lanes(prompt.prompt, prompt.images, prompt.condition, prompt.videos, prompt.inputs)
            except PromptError as error:
                yield error
                continue
            yield (encoded := PreparedPrompt(lanes, 0))
            total_tokens += encoded.num_tokens
            if max_tokens is not None and total_tokens >= max_tokens:
                return

    def encoded_ahead(self, prompts: Sequence[Prompt]) -> AbstractContextManager[None]:
        """Encode `prompts` together for the calls of `encode_lanes` within the `with` block, if that saves forwards."""
        return nullcontext()

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens; image models return an empty string."""

    @property
    def num_feature_hits(self) -> int:
        return 0

    @property
    def backend(self) -> Backend:
        return backend_for(self.device)

    def lanes(
        self,
        num_slots: int,
        num_lanes: int,
        capacity: int,
        feature_layers: Sequence[int] = (LAST,),
        num_pages: int | None = None,
    ) -> LaneModel:
        """Create a KV cache of `num_slots` × `num_lanes` rows of `capacity` positions, with this model over it.

        `feature_layers` and `num_pages` are as for `LaneModel`.
        """
        head = self.head if self._run is None else self._run.output_layer(self.head)
        return LaneModel(self.decoder, head, num_slots, num_lanes, capacity, self._run, feature_layers, num_pages)

    def compile(self) -> bool:
        """Compile each kind of forward at its first use from now on; returns False if the backend cannot."""
        if self._run is None:
            self._run = self.backend.compile(self.decoder)
        return self._run is not None and self._run.is_compiled

    def capture(self, fuses: bool = False) -> bool:
        """Run decoding steps as CUDA graphs from now on; returns False if the backend cannot capture this model.

        With `fuses`, layers of equal structure are compiled before they are captured.
        """
        if self._run is None:
            self._run = self.backend.capture(self.decoder, fuses)
        return self._run is not None and self._run.is_captured

    @property
    def kernels(self) -> str:
        """The dtype, processor name, execution mode and torch version of this model's forwards, for provenance."""
        weight = next(self.decoder.parameters())
        mode = "eager" if self._run is None else self._run.mode
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"{dtype}, {self.backend.describe(weight.device)}, {mode}, torch {torch.__version__}"

    def prefetch_prompts(self) -> None:
        """Encode prompts on a separate thread in engines that are created after this call."""
        self.prompt_thread = self.prompt_thread or PromptThread(self.backend.side_stream(self.device))
