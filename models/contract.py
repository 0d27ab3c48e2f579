"""The interface between the engine and models: prompts become prefixes, prefixes get lanes.

`models.target` implements it for text models, `models.llamagen.target` for image models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.backends.base import Backend
from models.inputs.clip import Clip
from models.inputs.prefix import Prefix
from models.inputs.prompt_prefetch import PromptThread
from models.kv.lanes import LaneModel

Condition = NDArray[np.float32] | int | None
"""What an image is made from where it is not the prompt's text: ready text features (L, D), or a class label."""


class TargetModel(Protocol):
    """A loaded model with its front end, as a target or an independent drafter.

    `num_lanes` rows hold one sample: two for classifier-free guidance, the conditional one first. `eos_ids` end an
    output; they are empty if its length is fixed, and `max_new_tokens` is then that length, None otherwise.
    `num_feature_hits` counts visual features from the cache. `prompt_thread` encodes prompts while steps run; None
    without prefetch.
    """

    name: str
    num_lanes: int
    max_new_tokens: int | None
    decoder: nn.Module
    head: nn.Module
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    prompt_thread: PromptThread | None

    @property
    def backend(self) -> Backend: ...

    @property
    def num_feature_hits(self) -> int: ...

    def encode_lanes(
        self,
        prompt: str,
        images: Sequence[NDArray[np.uint8]],
        condition: Condition,
        videos: Sequence[Clip] = (),
    ) -> list[Prefix]:
        """One sample's prompt for each lane, on the model's device.

        Raises:
            PromptError: the model's front end refuses it.
        """
        ...

    def lanes(self, num_slots: int, num_lanes: int, capacity: int) -> LaneModel:
        """Memory for `num_slots` samples of `num_lanes` rows and `capacity` columns."""
        ...

    @property
    def kernels(self) -> str:
        """The kernel path of this model's forwards, for the provenance of rows in half precision."""
        ...

    def compile(self) -> bool:
        """Compile every kind of forward at its first use from now on; returns whether this model can be compiled."""
        ...

    def capture(self) -> bool:
        """Replay steps as CUDA graphs from now on; returns whether this model can."""
        ...

    def prefetch_prompts(self) -> None:
        """Prepare prompts on a thread from now on."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids → text without special tokens; empty where the tokens are no text."""
        ...
