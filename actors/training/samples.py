"""Makes training samples from decoded rows, and measures accuracy and acceptance length of a trained head.

A sample is a text prompt with its answer, or a condition with the codes of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs import training as schema
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.contracts import Drafter, TreePolicy
from decoding.drafters import EagleDrafter, MedusaDrafter, ModelDrafter, MtpDrafter
from decoding.drafters.block import BlockDrafter
from decoding.drafters.merge import Guided, Merge, SingleLane
from decoding.trees import Chain, DynamicTree, StaticTree, branching_paths
from models.contract import Condition, TargetModel
from models.heads.training.block_loss import BlockTask
from models.heads.training.eagle3_loss import Eagle3Task
from models.heads.training.layer_cut import LayerCutTask
from models.heads.training.losses import EagleTask, HeadTask, MedusaTask
from models.heads.training.mtp_loss import MtpTask
from models.heads.training.teacher import Sample, TrainingSample, make_training_sample
from models.heads.training.trainer import Pace, count_right, key_of
from models.inputs.clip import Clip
from models.inputs.processing import PromptError
from models.target import Target

MTP_DRAFTS = 3
"""Drafts per step with which an MTP layer is measured, as in the preset `mtp`."""
SAMPLE_ERROR_CODES = {
    "missing_answer": "the answer column has no value in this row",
    "prompt_refused": "the processor, the chat template or the text encoder refuses the row",
    "too_long": "prompt and answer together have more tokens than training.max_tokens",
    "wrong_codes": "the codes are no whole numbers, not as many as an image has, or outside the codebook",
    "wrong_image": "an image target learns from rows with exactly one image each",
}
"""Error codes of decoded rows without a training sample; `pipeline.rows.schemas` defines further codes."""


class TrainingSampleError(Exception):
    """Raised for a row that yields no training sample; `code` is a key of `SAMPLE_ERROR_CODES`."""

    def __init__(self, code: str) -> None:
        assert code in SAMPLE_ERROR_CODES, code
        super().__init__(SAMPLE_ERROR_CODES[code])
        self.code = code


@dataclass(frozen=True)
class TrainingRow:
    """One decoded row: chat `messages`, `images` as uint8 RGB (height, width, 3) and `videos`; for text targets the
    `answer`, or its tokens `answer_ids` as the target generated them; for image targets the `codes` and the
    `condition`."""

    sample_id: str
    messages: list[dict[str, Any]]
    images: tuple[NDArray[np.uint8], ...]
    videos: tuple[Clip, ...] = ()
    answer: str | None = None
    answer_ids: tuple[int, ...] | None = None
    codes: NDArray[np.int64] | None = None
    condition: Condition = None


class TextSamples:
    """Makes training samples from text answers to prompts with images and videos, for any family of `models.target`."""

    def __init__(self, target: Target, job: schema.TrainDrafterJobConfig) -> None:
        assert job.image is None
        self._target = target
        self._prefix = job.answer_prefix
        self._max_tokens = job.training.max_tokens
        self._tokenizer = target.front_end.tokenizer
        eos_id = getattr(self._tokenizer, "eos_token_id", None)
        # If the target has several EOS tokens, the tokenizer's EOS token ends a turn.
        self._eos = [eos_id] if eos_id in target.eos_ids else sorted(target.eos_ids)[:1]

    def training_sample(self, row: TrainingRow, ordinal: int | None) -> TrainingSample:
        """Make the training sample of a row, or raise TrainingSampleError; `ordinal` is not used."""
        answer = self._answer(row)
        try:
            prompt = self._target.front_end.render(row.messages)
            prefix = self._target.encode(prompt, row.images, row.videos)
        except PromptError:
            raise TrainingSampleError("prompt_refused") from None
        if prefix.length + len(answer) > self._max_tokens:
            raise TrainingSampleError("too_long")
        return make_training_sample(self._target, prefix, answer)

    def is_null(self, ordinal: int | None) -> bool:
        """Return False: no condition is dropped."""
        return False

    def _answer(self, row: TrainingRow) -> list[int]:
        """Return the tokens of a row's answer. Generated tokens are used as they are: they end in EOS only if the
        target ended the text. Raise TrainingSampleError if there is no answer."""
        if row.answer_ids is not None:
            return list(row.answer_ids)
        if row.answer is None or not row.answer.strip():
            raise TrainingSampleError("missing_answer")
        tokens: list[int] = self._tokenizer(f"{self._prefix}{row.answer}", add_special_tokens=False)["input_ids"]
        return tokens + self._eos

    def request(self, row: TrainingRow, sampling: Sampling) -> Request:
        prompt = self._target.front_end.render(row.messages)
        return Request(row.sample_id, prompt, row.images, videos=row.videos, sampling=sampling)


CodesOf = Callable[[NDArray[np.uint8]], NDArray[np.int64]]
"""Maps an image, uint8 RGB (height, width, 3), to codes (grid²,) in raster order."""


class ImageSamples:
    """Makes training samples from conditions and image codes; the condition of `null_share` of the rows is dropped.

    A sample without its condition is the row's unconditional lane, as in guided decoding: it has null embeddings also
    at the padding positions of the conditional lane. `target` must have both lanes.
    """

    def __init__(self, target: TargetModel, job: schema.TrainDrafterJobConfig, codes_of: CodesOf | None) -> None:
        assert job.image is not None
        assert target.num_lanes == 2, "dropping a condition needs a target with an unconditional lane"
        assert target.max_new_tokens is not None
        self._target = target
        self._image = job.image
        self._seed = job.training.seed
        self._num_codes = target.max_new_tokens
        self._codes_of = codes_of

    def training_sample(self, row: TrainingRow, ordinal: int | None) -> TrainingSample:
        """Make the training sample of a row, or raise TrainingSampleError.

        `ordinal` seeds its random draws; None (held-out rows) disables them.
        """
        codes = self._codes(row)
        try:
            lanes = self._target.encode_lanes(_text(row.messages), (), row.condition)
        except PromptError:
            raise TrainingSampleError("prompt_refused") from None
        # The target decodes the first token; drafting starts after it.
        num_known = 1 if self._image.teach_first_draft else 2
        return make_training_sample(self._target, lanes[self.is_null(ordinal)], codes, num_known)

    def is_null(self, ordinal: int | None) -> bool:
        """Return whether the condition of the row with this ordinal is dropped."""
        return ordinal is not None and key_of(self._seed, "null", ordinal) < self._image.null_share * 2**63

    def _codes(self, row: TrainingRow) -> list[int]:
        codes = row.codes
        if self._codes_of is not None:
            if len(row.images) != 1:
                raise TrainingSampleError("wrong_image")
            codes = self._codes_of(row.images[0])
        if codes is None or codes.shape != (self._num_codes,):
            raise TrainingSampleError("wrong_codes")
        if codes.min() < 0 or codes.max() >= self._target.vocab_size:
            raise TrainingSampleError("wrong_codes")
        tokens: list[int] = codes.tolist()
        return tokens

    def request(self, row: TrainingRow, sampling: Sampling) -> Request:
        return Request(row.sample_id, _text(row.messages), condition=row.condition, sampling=sampling)


def _text(messages: Sequence[dict[str, Any]]) -> str:
    """Return the concatenated text of the user turns."""
    parts = [part for turn in messages if turn["role"] == "user" for part in turn["content"]]
    return "".join(part["text"] for part in parts if part["type"] == "text")


def pace_of(teaching: schema.TeachingConfig) -> Pace:
    """Return the optimisation settings of a job."""
    options = teaching.model_dump(include={field.name for field in fields(Pace)})
    return Pace(betas=(teaching.beta1, teaching.beta2), **options)


def accuracy(task: HeadTask, target: TargetModel, batches: Iterable[Sequence[Sample]]) -> dict[str, float]:
    """Compute the share of drafts whose top-1 token, and whose top-3 tokens, include the target's most likely token."""
    counts = [count_right(task, target, training_samples) for training_samples in batches]
    first, three, total = (sum(column) for column in zip(*counts)) if counts else (0, 0, 0)
    return {"top1_accuracy": first / max(1, total), "top3_accuracy": three / max(1, total)}


def acceptance(
    task: HeadTask, target: TargetModel, requests: Sequence[Request], slots: int, max_context_tokens: int
) -> dict[str, float]:
    """Decode `requests` with the head; return the mean acceptance length (with bonus token) and the decoded number."""
    drafter: Drafter
    tree: TreePolicy
    merge: Merge = SingleLane() if target.num_lanes == 1 else Guided()
    if isinstance(task, MedusaTask):
        widths = [3, 2, 1, 1][: task.heads.shape.num_heads]
        drafter, tree = MedusaDrafter(task.heads, target.num_lanes, merge), StaticTree(branching_paths(widths))
    elif isinstance(task, BlockTask):
        drafter, tree = BlockDrafter(task.network, task.embedding, task.head), Chain(task.network.shape.max_levels)
    elif isinstance(task, MtpTask):
        drafter, tree = MtpDrafter(task.network, task.head), Chain(MTP_DRAFTS)
    elif isinstance(task, LayerCutTask):
        assert isinstance(target, Target)
        trained = Target(task.module, target.front_end, "the trained drafter")
        drafter, tree = ModelDrafter(trained, [Full()], target.vocab_size), Chain(4)
    else:
        assert isinstance(task, (EagleTask, Eagle3Task))
        drafter, tree = EagleDrafter(task.network, task.head, target.num_lanes, merge), DynamicTree(4, 4, 25)
    engine = Engine(target, Method(drafter, tree, Exact()), min(slots, len(requests)), max_context_tokens)
    with torch.inference_mode():
        telemetries = [done.telemetry for done in engine.run(requests) if done.error is None]
    if isinstance(task, EagleTask):
        # The engine replaced the attention implementation; training of EAGLE uses transformers' SDPA.
        task.network.set_attn_implementation("sdpa")
    steps = sum(telemetry.num_spec_steps for telemetry in telemetries)
    accepted = sum(telemetry.num_accepted_draft_tokens for telemetry in telemetries)
    return {"mean_acceptance_length": 1 + accepted / max(1, steps), "num_decoded": len(telemetries)}
