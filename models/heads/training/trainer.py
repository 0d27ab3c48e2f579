"""Train EAGLE and Medusa heads on the hidden states of a frozen target over teacher-forced samples.

Random numbers are keyed by seed and sample ordinal, so results depend neither on resuming nor on the number of workers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from models.contract import TargetModel
from models.heads.training.losses import HeadTask
from models.heads.training.teacher import RowStates, Sample, States, TrainingSample, teach_rows

Reduce = Callable[[Tensor], object]
"""Sums a tensor over all workers in place (all-reduce)."""
Keep = Callable[[int, RowStates], RowStates]
"""Receives the ordinal and the states of a sample after the target's forward, and returns the states to learn from."""


def key_of(*parts: int | str) -> int:
    """Hash `parts` to a 63-bit random seed that is equal in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Pace:
    """Optimizer settings: AdamW over `num_steps` batches with `warmup_steps` of linear warmup, then `schedule`.

    `clip` bounds each gradient element ("value", as in LANTERN's code) or the gradient norm by `clip_limit`. Features
    get uniform noise of width `feature_noise`, times `noise_tokens` / sample length if set, as in EAGLE's code.
    """

    num_steps: int
    learning_rate: float
    seed: int = 0
    warmup_steps: int = 0
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: Literal["value", "norm", "none"] = "value"
    clip_limit: float = 0.5
    feature_noise: float = 0.2
    noise_tokens: int | None = 512

    def scale(self, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        if self.schedule == "linear":
            return max(0.0, 1.0 - done)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))) if self.schedule == "cosine" else 1.0


class Trainer:
    """Trains a head on a frozen target; `step` counts the batches so far.

    `reduce` sums over all workers, each of which receives its own part of every batch; the result equals training on
    the whole batch. One forward runs at most `max_rows` samples of at most `max_tokens` tokens, padding included, or
    one sample. GEMMs of the head run in `dtype`, fp32 or bf16; its weights and their gradients are fp32.
    """

    def __init__(
        self,
        target: TargetModel,
        task: HeadTask,
        pace: Pace,
        max_rows: int = 16,
        reduce: Reduce = lambda _: None,
        max_tokens: int = 8192,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.target, self.task, self.pace = target, task, pace
        self.step = 0
        target.decoder.requires_grad_(False)
        target.head.requires_grad_(False)
        self._max_rows, self._max_tokens, self._dtype, self._reduce = max_rows, max_tokens, dtype, reduce
        self._learned = {name: value for name, value in task.module.named_parameters() if value.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._learned.values(), lr=pace.learning_rate, betas=pace.betas, weight_decay=pace.weight_decay
        )

    def learn(
        self, training_samples: Sequence[tuple[int, Sample]], keep: Keep = lambda _, states: states
    ) -> float | None:
        """Take one optimizer step on this worker's part of a batch of (ordinal, sample).

        The target runs over samples without states, and `keep` receives these states.

        Returns the loss over the whole batch; None, and no step, for a batch without tokens to learn. Raises
        FloatingPointError, and does not change the head, if the loss is not finite.
        """
        # Without samples, the counts are those of an empty one.
        wanted = [torch.zeros(0, dtype=torch.bool), *(sample.wanted for _, sample in training_samples)]
        counts = [self.task.counts(each) for each in wanted]
        total = torch.tensor(counts, dtype=torch.float64, device=self.target.device).sum(dim=0)
        self._reduce(total)
        loss = self._update(training_samples, total.clamp_min(1), keep) if bool((total > 0).any()) else None
        self.step += 1
        return loss

    @torch.enable_grad()
    def _update(self, training_samples: Sequence[tuple[int, Sample]], counts: Tensor, keep: Keep) -> float:
        self.task.module.train()
        loss: Tensor = torch.zeros(1, device=self.target.device)
        for value in self._learned.values():
            value.grad = torch.zeros_like(value)
        for some in self._groups(training_samples):
            states = States.of(self._taught(some, keep), self.target.device)
            noise = self._noise(states, [ordinal for ordinal, _ in some])
            with self.target.backend.autocast(self.target.device, self._dtype):
                terms = self.task.sums(states, noise)
            part = (terms / counts).sum().to(torch.float32)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        # One all-reduce of loss and gradients, because many small ones are slow.
        gradients = [value.grad for value in self._learned.values() if value.grad is not None]
        flat = torch.cat([loss, *(each.flatten() for each in gradients)])
        self._reduce(flat)
        loss, *parts = torch.split(flat, [1, *(each.numel() for each in gradients)])
        for each, reduced in zip(gradients, parts, strict=True):
            each.copy_(reduced.view_as(each))
        if not bool(loss.isfinite()):
            raise FloatingPointError(
                f"the loss of step {self.step + 1} is {float(loss)}: lower training.learning_rate, or load the target "
                "in a type with more range (target.dtype)"
            )
        if self.pace.clip == "value":
            torch.nn.utils.clip_grad_value_(self._learned.values(), self.pace.clip_limit)
        elif self.pace.clip == "norm":
            torch.nn.utils.clip_grad_norm_(self._learned.values(), self.pace.clip_limit)
        for group in self._optimizer.param_groups:
            group["lr"] = self.pace.learning_rate * self.pace.scale(self.step)
        self._optimizer.step()
        self.task.module.eval()
        return float(loss)

    def _groups(self, samples: Sequence[tuple[int, Sample]]) -> list[list[tuple[int, Sample]]]:
        """Split a batch into the samples of each forward, by ascending length, for less padding."""
        groups: list[list[tuple[int, Sample]]] = []
        for each in sorted(samples, key=lambda each: each[1].length):
            size = len(groups[-1]) if groups else self._max_rows
            if size < self._max_rows and (size + 1) * each[1].length <= self._max_tokens:
                groups[-1].append(each)
            else:
                groups.append([each])
        return groups

    def _taught(self, samples: Sequence[tuple[int, Sample]], keep: Keep) -> list[RowStates]:
        """Return the states of samples; the target runs once over those without."""
        fresh = [(ordinal, sample) for ordinal, sample in samples if isinstance(sample, TrainingSample)]
        taught = iter(
            teach_rows(self.target, [sample for _, sample in fresh], self.task.feature_layers) if fresh else ()
        )
        return [sample if isinstance(sample, RowStates) else keep(ordinal, next(taught)) for ordinal, sample in samples]

    def _noise(self, states: States, ordinals: Sequence[int]) -> Tensor:
        """Draw uniform noise (b, L, F) for the features of every sample."""
        noise = torch.zeros_like(states.features)
        if self.pace.feature_noise == 0.0:
            return noise
        for row, (ordinal, length) in enumerate(zip(ordinals, states.lengths, strict=True)):
            generator = torch.Generator(noise.device).manual_seed(key_of(self.pace.seed, "noise", ordinal))
            drawn = torch.rand((length, noise.shape[2]), generator=generator, device=noise.device)
            scale = 1.0 if self.pace.noise_tokens is None else self.pace.noise_tokens / length
            noise[row, :length] = (drawn - 0.5) * self.pace.feature_noise * scale
        return noise

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the trained weights on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self._learned.items()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Restore weights that `weights` returned."""
        with torch.no_grad():
            for name, value in self._learned.items():
                value.copy_(weights[name])

    def state(self) -> dict[str, Any]:
        """Return the training state for `resume`: step, weights and optimizer state."""
        return {"step": self.step, "weights": self.weights(), "optimizer": self._optimizer.state_dict()}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore a training state that `state` returned."""
        self.step = int(state["step"])
        self.set_weights(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def count_right(task: HeadTask, target: TargetModel, samples: Sequence[Sample]) -> tuple[int, int, int]:
    """Count tokens to learn whose most probable token under the target is the head's top choice, or in its top three.

    Returns both counts and the number of tokens to learn. Logits of one sample exist at a time.
    """
    fresh = [sample for sample in samples if isinstance(sample, TrainingSample)]
    taught = iter(teach_rows(target, fresh, task.feature_layers) if fresh else ())
    first = three = total = 0
    for sample in samples:
        states = States.of([sample if isinstance(sample, RowStates) else next(taught)], target.device)
        use = states.wanted[:, 2:]
        best = task.logits(states)[use].topk(3, dim=-1).indices
        true = target.head(states.hidden[:, 1:-1][use].to(next(target.head.parameters()).dtype)).argmax(dim=-1)
        hits = best == true[:, None]
        first, three, total = first + int(hits[:, 0].sum()), three + int(hits.sum()), total + int(use.sum())
    return first, three, total
