"""What text and image models have in common: a decoder and an output layer on a backend, and their KV caches."""

from __future__ import annotations

import torch
from torch import nn

from models.backends.base import Backend
from models.backends.forward import DecoderRunner
from models.backends.select import backend_for
from models.inputs.prompt_prefetch import PromptThread
from models.kv.lanes import LaneModel


class BaseModel:
    """A decoder with its output layer, run eagerly, compiled or captured. Subclasses set the attributes."""

    decoder: nn.Module
    head: nn.Module
    device: torch.device
    prompt_thread: PromptThread | None = None
    _run: DecoderRunner | None = None

    @property
    def backend(self) -> Backend:
        """The backend of the model's device."""
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
