"""Defines the schema of a training job: heads on a target, trained on the rows of a source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from configs.drafters import DraftVocabularyConfig
from configs.schema import SHORT_PROMPT, CheckpointConfig, PromptConfig, WeightsConfig
from configs.section import BUILT_IN, NumGpus, Place, Section
from configs.source import JobOutputConfig, SourceConfig
from configs.synthesis import ConditionColumnsConfig, TextEncoderConfig


class EagleHeadConfig(Section):
    """An EAGLE-2 head: one decoder layer that predicts the target's next hidden state."""

    kind: Literal["eagle"] = "eagle"


class Eagle3HeadConfig(Section):
    """An EAGLE-3 head of one layer, written in the format of speculators."""

    kind: Literal["eagle3"] = "eagle3"
    num_draft_steps: Annotated[int, Field(ge=1, le=8)] = 3
    """Draft steps per token in training; each costs another forward of the head."""
    feature_layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=16)] | None = None
    """Target states that the head reads: 0 is the embedding, k the output of the k-th layer; by default 2, N / 2 and
    N − 3 of N layers."""
    vocabulary: DraftVocabularyConfig | None = None
    """Tokens that are drafted; all if left out."""


class MedusaHeadConfig(Section):
    """Medusa heads: head i predicts the token i positions after the next token."""

    kind: Literal["medusa"] = "medusa"
    num_heads: Annotated[int, Field(ge=1, le=16)] = 4
    """Number of Medusa heads."""


class BlockHeadConfig(Section):
    """A block drafter (DFlash), written in the format of speculators."""

    kind: Literal["block"] = "block"
    block_size: Annotated[int, Field(ge=2, le=32)] = 8
    """Positions of a block: the pending token and `block_size` − 1 masks, one for each draft."""
    num_layers: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of decoder layers."""
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    """The token that represents a mask; no answer may have it, and its embedding is not zero. If left out, it is the
    first of the tokenizer's mask, padding, unknown and first token (bos) that fits."""
    feature_layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=16)] | None = None
    """As of `eagle3`."""


class MtpHeadConfig(Section):
    """A multi-token-prediction (MTP) layer, written as a part of a copy of the target's checkpoint, which has none."""

    kind: Literal["mtp"] = "mtp"
    num_draft_steps: Annotated[int, Field(ge=1, le=8)] = 3
    """As of `eagle3`."""


class LayerCutHeadConfig(Section):
    """A drafter of its own: the target with some of its layers, trained on the target's distributions and written as a
    transformers checkpoint. Parts that read images and videos are copied and not trained."""

    kind: Literal["layer_cut"] = "layer_cut"
    num_layers: Annotated[int, Field(ge=1, le=64)] = 4
    """Number of layers, at equal distances, the first and the last among them."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The target's layers in place of `num_layers`, counted from 0."""
    freeze_embeddings: bool = True
    """Whether the token embedding and the output layer stay those of the target."""

    def indices(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the layers for a target with `num_target_layers` layers; raise ValueError if it lacks one of them."""
        if self.layers is None:
            if self.num_layers > num_target_layers:
                raise ValueError(f"head.num_layers: the target has {num_target_layers} layers")
            last = max(1, self.num_layers - 1)
            return tuple(round(index * (num_target_layers - 1) / last) for index in range(self.num_layers))
        if not self.layers or max(self.layers) >= num_target_layers:
            raise ValueError(f"head.layers: name layers from 0 to {num_target_layers - 1} of the target")
        return self.layers


class TrainingImageColumnsConfig(ConditionColumnsConfig):
    """Columns with the image or the codes of each row, and with its condition."""

    codes: str | None = None
    """VQ codes in raster order; if left out, `image.vq` encodes the row's image."""


class ImageTeachingConfig(Section):
    """Training data of image targets: codes and conditions of rows, and the share of dropped conditions."""

    columns: TrainingImageColumnsConfig = TrainingImageColumnsConfig()
    vq: WeightsConfig | None = None
    """The VQ model that encodes images (`path`, `revision`, `dtype`, `device`); images are center-cropped to a square.
    """
    condition: TextEncoderConfig | None = None
    """The T5 encoder that encodes prompts (`path`, `revision`, `dtype`, `device`, `truncate`)."""
    null_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Share of rows whose condition is dropped."""
    teach_first_draft: bool = True
    """Whether the draft after the first code is trained."""

    @model_validator(mode="after")
    def _one_of_each(self) -> ImageTeachingConfig:
        if (self.columns.codes is None) == (self.vq is None):
            raise ValueError("give either columns.codes, or vq to encode the rows' images with")
        ready = [name for name in ("features", "label") if getattr(self.columns, name) is not None]
        if len(ready) + (self.condition is not None) != 1:
            raise ValueError("give one of columns.features, columns.label, and condition to encode prompts with")
        return self


class TeachingConfig(Section):
    """Rows, optimisation and evaluation. The defaults of optimisation are taken from LANTERN's public code."""

    num_steps: Annotated[int, Field(ge=1)] = 2000
    """Number of batches."""
    batch_rows: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rows of a batch, over all workers together."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-4
    """Peak learning rate of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps over which the learning rate rises."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Decay of the learning rate to 0 at the last step: `linear` or `cosine`; `constant` disables decay."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """β₁ of AdamW."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """β₂ of AdamW."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """Weight decay of AdamW."""
    clip: Literal["value", "norm", "none"] = "value"
    """Gradient clipping: by `value`, by the `norm` of all gradients, or `none`."""
    clip_limit: Annotated[float, Field(gt=0.0)] = 0.5
    """Bound of `clip`."""
    feature_noise: Annotated[float, Field(ge=0.0)] = 0.2
    """Width of the uniform noise on EAGLE's input features."""
    noise_tokens: Annotated[int, Field(ge=1)] | None = 512
    """The noise is scaled by this number divided by the row's length in tokens; `null` does not scale it."""
    max_rows: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of rows of the source that are used; 200,000 answers of a `job_output` if left out."""
    shuffle_rows: Annotated[int, Field(ge=1)] = 4096
    """Rows of the shuffle buffer."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of rows that are held out from training."""
    held_out_rows: Annotated[int, Field(ge=1)] = 64
    """Maximum number of held-out rows on which the head is evaluated."""
    max_tokens: Annotated[int, Field(ge=16)] = 1024
    """Maximum number of tokens of a row; longer rows are skipped."""
    measure_every_steps: Annotated[int, Field(ge=1)] = 500
    """Number of steps between evaluations of accuracy."""
    gemm_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the head's GEMMs; its weights and optimizer states are fp32. `auto` is bfloat16 for a bfloat16 target."""
    keep: Literal["best", "last"] = "best"
    """Weights that are written: those of the `best` evaluation or of the `last` step."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of initial weights, shuffling and noise."""

    @model_validator(mode="after")
    def _steps(self) -> TeachingConfig:
        if self.warmup_steps >= self.num_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be fewer than num_steps ({self.num_steps})")
        return self


class AcceptanceLengthConfig(Section):
    """Measurement of the acceptance length: held-out prompts are decoded with the trained head and exact acceptance."""

    num_rows: Annotated[int, Field(ge=0)] = 16
    """Number of held-out prompts that are decoded at the end; 0 disables the measurement."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 128
    """Maximum number of generated tokens of a text; images are always complete."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """As `sampling.temperature`."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """As `sampling.top_k`."""
    guidance_scale: Annotated[float, Field(ge=0.0, le=1000.0)] = 1.0
    """Guidance scale of images."""


class TeacherCacheConfig(Section):
    """The target's states of training samples on disk. They are computed in the first epoch and read in later ones."""

    path: Place | None = None
    """Folder that runs use one after the other; if left out, one in the output that is removed at the end."""
    max_bytes: Annotated[int, Field(ge=0)] = 20_000_000_000
    """Maximum bytes of the folder; never more than half of the free disk space is taken. 0 disables the cache."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of stored states; `auto` is the target's type, which loses nothing."""


class WorkersConfig(Section):
    """Training workers: one process, or several under Ray Train. Changes the result only by rounding."""

    count: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of processes that share every batch."""
    num_gpus: NumGpus = "auto"
    """GPUs of each worker; 0 trains on the CPU. `auto` is one if the target's device and the Ray have one, else 0."""
    torch_threads: Annotated[int, Field(ge=1)] | None = None
    """Torch threads of each worker."""
    max_forward_rows: Annotated[int, Field(ge=1)] = 16
    """Maximum number of rows in one forward of a worker."""
    max_forward_tokens: Annotated[int, Field(ge=16)] = 8192
    """Maximum number of tokens in one forward of a worker, padding included, unless it is of one row; bounds memory."""
    teacher_cache: TeacherCacheConfig = TeacherCacheConfig()
    read_ahead_batches: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of batches that are read and decoded ahead."""
    checkpoint_every_s: Annotated[float, Field(ge=0.0)] = 300.0
    """Seconds between checkpoints."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Maximum number of restarts of dead workers."""
    ray_address: str = "local"
    """As `job.ray_address`."""

    @property
    def gpus(self) -> float:
        """`num_gpus`, or 0 while it is `auto` (see `pipeline.resources`)."""
        return 0.0 if self.num_gpus == "auto" else self.num_gpus


class TrainingOutputConfig(Section):
    """Folder and type of the written head."""

    path: Place
    """The head's folder."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the written weights; `auto` is the target's type."""


def _source_tag(section: Any) -> str:
    kind = section.get("kind") if isinstance(section, dict) else getattr(section, "kind", None)
    return "job_output" if kind == "job_output" else BUILT_IN


class TrainDrafterJobConfig(Section):
    """A training job: a drafter for a target (a head of EAGLE, EAGLE-3 or Medusa, a block drafter, an MTP
    layer, or some of the target's layers), trained on the rows of a source."""

    source: Annotated[
        Annotated[SourceConfig, Tag(BUILT_IN)] | Annotated[JobOutputConfig, Tag("job_output")],
        Discriminator(_source_tag),
    ]
    prompt: Annotated[PromptConfig, SHORT_PROMPT] = PromptConfig(text="")
    answer_column: str | None = None
    """The column with the text that the drafter learns to predict; set it or `image`, and neither with a `job_output`.
    """
    answer_prefix: str = " "
    """Text between the rendered prompt and the answer, as the target generates it."""
    image: ImageTeachingConfig | None = None
    """In place of `answer_column`, for a target that generates images."""
    target: CheckpointConfig
    head: Annotated[
        EagleHeadConfig | Eagle3HeadConfig | MedusaHeadConfig | BlockHeadConfig | MtpHeadConfig | LayerCutHeadConfig,
        Field(discriminator="kind"),
    ] = EagleHeadConfig()
    training: TeachingConfig = TeachingConfig()
    acceptance: AcceptanceLengthConfig = AcceptanceLengthConfig()
    workers: WorkersConfig = WorkersConfig()
    output: TrainingOutputConfig

    @model_validator(mode="after")
    def _text_or_image(self) -> TrainDrafterJobConfig:
        if isinstance(self.head, (BlockHeadConfig, MtpHeadConfig, LayerCutHeadConfig)) and self.image is not None:
            raise ValueError(
                f"head.kind: {self.head.kind} is for targets that write text; take eagle, eagle3 or medusa"
            )
        if self.prompt.answer_prefix is not None:
            raise ValueError("prompt.answer_prefix: the answers of a training job begin with answer_prefix; set that")
        if isinstance(self.source, JobOutputConfig):
            for name in ("prompt", "answer_column", "answer_prefix", "image"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: a source of kind job_output has its own; leave it out")
            return self
        if (self.answer_column is None) == (self.image is None):
            raise ValueError("give either answer_column, for a target that writes text, or image")
        if self.image is not None and self.image.condition is not None and not self.prompt.text:
            raise ValueError("image.condition encodes the prompt, so prompt must name the caption, as in '{caption}'")
        if not self.prompt.has_turns:
            raise ValueError("prompt: give prompt.text or prompt.messages beside prompt.template_options")
        if self.image is not None and self.prompt.template_options:
            raise ValueError("prompt.template_options: a target that generates images has no chat template")
        if self.source.video.cuts:
            raise ValueError(
                f"source.video.{self.source.video.cut_by}: an answer is to a whole video, not to clips of it"
            )
        return self

    def resolved(self) -> dict[str, Any]:
        """Return all fields that determine the trained head, as plain JSON data, without workers and devices."""
        data = self.model_dump(mode="json") | {"prompt": self.prompt.content()}
        del data["workers"], data["output"]["path"]
        for part in (data["target"], *(data["image"] or {}).values()):
            if isinstance(part, dict):
                part.pop("device", None)
        return data
