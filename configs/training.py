"""The schema of a training job: heads on a target, taught with the rows of an ordinary source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.schema import SHORT_PROMPT, Checkpoint, Prompt, Source, Weights
from configs.section import Place, Section
from configs.synthesis import ConditionColumns, TextEncoder


class EagleHead(Section):
    """One layer that predicts the target's next state (EAGLE-2)."""

    kind: Literal["eagle"] = "eagle"


class MedusaHead(Section):
    """Medusa heads, each for one token further ahead."""

    kind: Literal["medusa"] = "medusa"
    num_heads: Annotated[int, Field(ge=1, le=16)] = 4
    """Number of Medusa heads."""


class ImageColumns(ConditionColumns):
    """Columns with a row's image or codes, and with its condition."""

    codes: str | None = None
    """VQ codes in raster order; without it the row's picture is encoded by `image.vq`."""


class ImageTeaching(Section):
    """A target that makes images: how rows become codes and conditions, and how conditions are taken away."""

    columns: ImageColumns = ImageColumns()
    vq: Weights | None = None
    """The VQ model: `path`, `revision`, `dtype`, `device`; pictures are cut to a square around the middle."""
    condition: TextEncoder | None = None
    """The T5: as above, and `truncate`."""
    null_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """The share of rows whose condition is taken away."""
    teach_first_draft: bool = True
    """Whether the draft behind the first code is taught."""

    @model_validator(mode="after")
    def _one_of_each(self) -> ImageTeaching:
        if (self.columns.codes is None) == (self.vq is None):
            raise ValueError("give either columns.codes, or vq to encode the rows' images with")
        ready = [name for name in ("features", "label") if getattr(self.columns, name) is not None]
        if len(ready) + (self.condition is not None) != 1:
            raise ValueError("give one of columns.features, columns.label, and condition to encode prompts with")
        return self


class Teaching(Section):
    """What is shown, how often, how fast. The defaults of optimisation are those of LANTERN's public code."""

    num_steps: Annotated[int, Field(ge=1)] = 2000
    """Batches."""
    batch_rows: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rows of a batch, over all workers together."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-4
    """At its highest."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which it rises."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How it falls afterwards, to 0 at the last step: `linear`, `cosine`, or `constant`."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Of AdamW."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Of AdamW."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """Of AdamW."""
    clip: Literal["value", "norm", "none"] = "value"
    """Bounds every gradient by itself (`value`), or the `norm` of all; `none`."""
    clip_limit: Annotated[float, Field(gt=0.0)] = 0.5
    """The bound."""
    feature_noise: Annotated[float, Field(ge=0.0)] = 0.2
    """Width of the noise on EAGLE's features."""
    noise_tokens: Annotated[int, Field(ge=1)] | None = 512
    """The noise is scaled by this over the row's length; null leaves it as it is."""
    max_rows: Annotated[int, Field(ge=2)] | None = None
    """Only the first rows of the source."""
    shuffle_rows: Annotated[int, Field(ge=1)] = 4096
    """Rows held to be shuffled."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """The share that is never learned from."""
    held_out_rows: Annotated[int, Field(ge=1)] = 64
    """How many of those are measured."""
    max_tokens: Annotated[int, Field(ge=16)] = 1024
    """Longer rows are left out."""
    measure_every_steps: Annotated[int, Field(ge=1)] = 500
    """How often accuracy is measured."""
    keep: Literal["best", "last"] = "best"
    """Which weights are written: `best` or `last`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of everything random."""

    @model_validator(mode="after")
    def _steps(self) -> Teaching:
        if self.warmup_steps >= self.num_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be fewer than num_steps ({self.num_steps})")
        return self


class Acceptance(Section):
    """How the finished head is tried in decoding on held-out prompts, exact acceptance, a tree of 25 nodes."""

    num_rows: Annotated[int, Field(ge=0)] = 16
    """Held-out prompts decoded at the end; 0 for none."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 128
    """Of a text; images are made whole."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """As `sampling.temperature`."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """As `sampling.top_k`."""
    guidance_scale: Annotated[float, Field(ge=0.0, le=1000.0)] = 1.0
    """Of images."""


class Workers(Section):
    """Training workers: one process, or several under Ray Train. Does not change the result, up to rounding."""

    count: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that share every batch."""
    num_gpus: Annotated[float, Field(ge=0.0)] = 0.0
    """Of each, under Ray."""
    torch_threads: Annotated[int, Field(ge=1)] | None = None
    """Of each."""
    max_forward_rows: Annotated[int, Field(ge=1)] = 16
    """Rows that one runs at once, which bounds memory."""
    read_ahead_batches: Annotated[int, Field(ge=1, le=64)] = 2
    """Batches decoded ahead."""
    checkpoint_every_s: Annotated[float, Field(ge=0.0)] = 300.0
    """Seconds between checkpoints."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """How often dead workers are started again."""
    ray_address: str = "local"
    """As `job.ray_address`."""


class TrainingOutput(Section):
    """Where the head goes."""

    path: Place
    """The head's folder."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the head is written in; `auto` is the target's type."""


class TrainDrafterJob(Section):
    """A whole training job."""

    source: Source
    prompt: Annotated[Prompt, SHORT_PROMPT] = Prompt(text="")
    answer_column: str | None = None
    """The column with the text that the drafter learns to predict; set it or `image`."""
    answer_prefix: str = " "
    """Text between the rendered prompt and the answer, as the target generates it."""
    image: ImageTeaching | None = None
    """In place of `answer_column`: the target makes images."""
    target: Checkpoint
    head: Annotated[EagleHead | MedusaHead, Field(discriminator="kind")] = EagleHead()
    training: Teaching = Teaching()
    acceptance: Acceptance = Acceptance()
    workers: Workers = Workers()
    output: TrainingOutput

    @model_validator(mode="after")
    def _text_or_image(self) -> TrainDrafterJob:
        if (self.answer_column is None) == (self.image is None):
            raise ValueError("give either answer_column, for a target that writes text, or image")
        if self.image is not None and self.image.condition is not None and not self.prompt.text:
            raise ValueError("image.condition encodes the prompt, so prompt must name the caption, as in '{caption}'")
        if self.source.video.clip_s is not None:
            raise ValueError("source.video.clip_s: an answer is to a whole video, not to clips of it")
        return self

    def resolved(self) -> dict[str, Any]:
        """All fields that determine the trained head, as plain JSON data, without workers and devices."""
        data = self.model_dump(mode="json")
        del data["workers"], data["output"]["path"]
        for part in (data["target"], *(data["image"] or {}).values()):
            if isinstance(part, dict):
                part.pop("device", None)
        return data
