"""Defines the engine's inputs and outputs: `Request`, `Sampling`, `Completion` and `Telemetry`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from decoding.grammar import Grammar
    from models.inputs.clip import Clip
    from models.inputs.content import ConditionPair
    from models.inputs.packing import PackedInputs

FINISH_REASONS = ("stop", "length", "stop_string", "looped", "error")
"""`stop` is an EOS token, `stop_string` a string of `Sampling.stop`, `looped` a repetition (`Sampling.stop_loops`)."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. A `stop` string ends the output and is
    removed from the text. With `stop_loops`, a sequence of 1 to 64 tokens that is repeated this number of times, over
    at least `min_loop_tokens` tokens, ends the output; 0 is off. `guidance_scale` up to 1 is off; `guidance_interval`
    −1 guides every token, i guides the tokens 0 … i + 1. The other fields are logits processors as in transformers'
    `generate`, see `decoding.processors`: `repetition_penalty` and `no_repeat_ngram_size` count the prompt's tokens
    too, `min_length` includes the prompt and is ignored if `min_new_tokens` is positive, and `sequence_bias` are pairs
    of a sequence and its bias.

    Raises:
        ValueError: a value is outside its range; the message names the field.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    min_length: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_loops: int = 0
    min_loop_tokens: int = 64
    guidance_scale: float = 1.0
    guidance_interval: int = -1

    def __post_init__(self) -> None:
        infinity = float("inf")
        bounds = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < infinity, "0 (greedy) or a positive number"),
            "top_k": (self.top_k >= 0, "0 (off) or positive"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "min_p": (0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            "repetition_penalty": (0.0 < self.repetition_penalty < infinity, "positive"),
            "no_repeat_ngram_size": (self.no_repeat_ngram_size >= 0, "0 (off) or positive"),
            "bad_words_ids": (all(self.bad_words_ids), "sequences of at least one token"),
            "sequence_bias": (
                all(tokens and abs(bias) < infinity for tokens, bias in self.sequence_bias),
                "pairs of a sequence of at least one token and a finite number",
            ),
            "min_new_tokens": (self.min_new_tokens >= 0, "0 or positive"),
            "min_length": (self.min_length >= 0, "0 or positive"),
            "stop_loops": (self.stop_loops == 0 or self.stop_loops >= 2, "0 (off) or at least 2"),
            "min_loop_tokens": (self.min_loop_tokens >= 2, "at least 2"),
            "guidance_scale": (0.0 <= self.guidance_scale < infinity, "0 or a positive number"),
            "guidance_interval": (self.guidance_interval >= -1, "-1 (always) or more"),
        }
        for name, (is_valid, bound) in bounds.items():
            if not is_valid:
                raise ValueError(f"sampling.{name} must be {bound}, not {getattr(self, name)}")
        if any(not text for text in self.stop):
            raise ValueError("sampling.stop must not contain an empty string")

    @property
    def sets_ends(self) -> bool:
        """Whether a minimum length or forced tokens decide where texts begin and end."""
        return bool(self.min_new_tokens or self.min_length or self.forced_eos_token_id) or (
            self.forced_bos_token_id is not None
        )

    @cached_property
    def max_token_id(self) -> int:
        """Largest token id that must be in the vocabulary, −1 without any; suppressed tokens may be outside of it."""
        sequences = chain(self.bad_words_ids, (tokens for tokens, _ in self.sequence_bias))
        forced = (-1 if self.forced_bos_token_id is None else self.forced_bos_token_id, *self.forced_eos_token_id)
        return max(chain(forced, *sequences))


@dataclass(frozen=True)
class Request:
    """One sample to decode.

    `prompt` is the rendered text with image placeholders, exactly as the target's processor expects it; `images` are
    uint8 RGB arrays of shape (height, width, 3) and `videos` are clips, each in the order of their placeholders.
    `inputs` are the outputs of the target's processor for them; models with that processor then do not run it, and
    images and videos may be left out unless another model needs them. `condition` replaces the prompt for
    image-generation models: text features (L, D), also with those of a negative prompt, or a class label. Noise is
    keyed by `(seed, sample_id, replica, attempt)` and does not depend on the batch. The output follows `grammar` and
    then EOS; it is whole unless the request ends by `length` or `looped`. A `plain` request is decoded without the
    method of the job, by engines that have both (`actors.serving.audited`).

    Raises:
        ValueError: a grammar together with options that end or continue texts in other places.
    """

    sample_id: str
    prompt: str
    images: tuple[NDArray[np.uint8], ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    replica: int = 0
    attempt: int = 0
    condition: NDArray[np.float32] | ConditionPair | int | None = None
    videos: tuple[Clip, ...] = ()
    inputs: PackedInputs | None = None
    grammar: Grammar | None = None
    plain: bool = False

    def __post_init__(self) -> None:
        if self.grammar is not None and (self.sampling.stop or self.sampling.ignore_eos):
            raise ValueError("a request with a grammar takes neither stop strings nor ignore_eos")
        if self.grammar is not None and self.sampling.sets_ends:
            raise ValueError("a request with a grammar takes neither a minimum length nor forced tokens")

    @property
    def num_images(self) -> int:
        return len(self.images) if self.inputs is None else self.inputs.num_images

    @property
    def num_frames(self) -> tuple[int, ...]:
        """Number of frames of each video."""
        return tuple(len(clip.frames) for clip in self.videos) if self.inputs is None else self.inputs.num_frames


@dataclass(frozen=True)
class RequestError:
    """Error of a request: a stable `code` (see `decoding.errors`) and a message."""

    code: str
    message: str


@dataclass
class Telemetry:
    """Statistics of speculation for one request, with vLLM's metric names.

    `num_spec_steps` is the number of verify steps after the prefill; `acceptance_histogram[i]` is the number of steps
    that kept i drafts, so its length is the maximum depth + 1. `degraded` marks a request on which the drafter failed.
    The number of generated tokens is 1 + accepted drafts + steps − (1 if `ended_inside_path`: the output ended before
    the last token of the last step). Times are shares of the batch's time, in milliseconds.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    num_relaxed_accepts: int = 0
    ended_inside_path: bool = False
    target_forwards: int = 0
    drafter_forwards: int = 0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    batch_size_mean: float = 0.0
    degraded: bool = False
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per step, 1 + accepted drafts / steps; 1.0 without steps."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of draft tokens that were accepted; 0.0 without draft tokens."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True)
class Completion:
    """Result of one request: tokens (with EOS if generated), text and telemetry, or an error.

    `mean_logprob` is the mean natural-log probability of the kept tokens under the target before temperature and
    filters. `finish_reason` is one of `FINISH_REASONS`; with `looped`, `loop_start` is the index of the loop's first
    token. `attempt` is that of the request. `method` is set only in a trial of methods, `failed_checks` by actors with
    checks.
    """

    sample_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    mean_logprob: float = 0.0
    finish_reason: str = "length"
    loop_start: int | None = None
    num_input_tokens: int = 0
    num_visual_tokens: int = 0
    telemetry: Telemetry = field(default_factory=Telemetry)
    error: RequestError | None = None
    method: str = ""
    attempt: int = 0
    failed_checks: tuple[str, ...] = ()
