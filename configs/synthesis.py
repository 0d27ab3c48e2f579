"""Defines the schema of a synthesis job: prompts in, images out."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from configs.acceptance import LanternAcceptanceConfig, LVSpecAcceptanceConfig
from configs.contexts import FullContextConfig
from configs.drafters import BlockDrafterConfig
from configs.method import MethodConfig
from configs.output import ExportConfig
from configs.pool import ActorPoolConfig, EnginePoolConfig, JobSectionConfig
from configs.schema import SHORT_PROMPT, DatasetJobConfig, SinkConfig, WeightsConfig
from configs.section import Section
from configs.source import SourceConfig


class ImagePromptConfig(Section):
    """The prompt of the text encoder."""

    text: str
    """A template; `{column}` is replaced by the row's value. `prompt: some text` is the short form. Not needed if rows
    contain conditions."""


class ConditionColumnsConfig(Section):
    """Columns with the condition of each row."""

    features: str | None = None
    """Text features of the row; if left out, `prompt` is encoded."""
    features_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of features that are stored as bytes: `float32`, `float16` or `bfloat16`."""
    label: str | None = None
    """The row's class, for class-conditional targets."""


class ImageColumnsConfig(ConditionColumnsConfig):
    """Columns with the condition and sampling options of each row; a row without a value uses the job's value."""

    seed: str | None = None
    """The row's seed."""
    temperature: str | None = None
    """In place of `sampling.temperature`."""
    top_k: str | None = None
    """In place of `sampling.top_k`."""
    top_p: str | None = None
    """In place of `sampling.top_p`."""
    guidance_scale: str | None = None
    """In place of `sampling.guidance_scale`."""
    negative_prompt: str | None = None
    """In place of `sampling.negative_prompt`."""


class TextEncoderConfig(WeightsConfig):
    """The T5 encoder that maps prompts to features."""

    truncate: bool = False
    """Whether long prompts are truncated."""


class ImageModelConfig(Section):
    """The target image model, the checkpoint of its drafter, its text encoder and its VQ decoder."""

    target: WeightsConfig
    """A LlamaGen checkpoint: a published `.pt` file, a folder of LANTERN or of this project, or a hub id
    `owner/name/file`."""
    drafter: WeightsConfig | None = None
    """An EAGLE head, Medusa heads or a smaller LlamaGen; not needed by the drafters `none`, `lookup`, `jacobi`,
    `suffix` and `layer_skip`."""
    vq: WeightsConfig | None = None
    """The VQ model; not needed without images, unless the acceptance is `lantern`."""
    condition: TextEncoderConfig | None = None
    """The T5 encoder; not needed if rows contain features or labels."""


class ImageSamplingConfig(Section):
    """Sampling parameters of image codes, applied in the order guidance, temperature, `top_k`, `top_p`; the target
    determines the number of codes."""

    num_images_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of images per prompt."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    """Softmax temperature; 0 is greedy decoding."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 1000
    """Sample from this number of most likely codes; 0 is off."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the most likely codes with this total probability; 1 is off."""
    guidance_scale: Annotated[float, Field(ge=0.0, le=1000.0)] = 7.5
    """Scale s of classifier-free guidance; values up to 1 disable guidance, which halves the work."""
    guidance_interval: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Codes that are guided: −1 for all, i for the codes 0 … i + 1."""
    negative_prompt: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Text that guidance leads [away from](../guides/synthesize.md#negative-prompts), taken literally; by default the
    target's null embedding."""


class VqPoolConfig(ActorPoolConfig):
    """The actors that decode codes to pixels."""

    batch_rows: Annotated[int, Field(ge=1, le=4096)] = 8
    """Number of images decoded at once."""


class ImageFileConfig(Section):
    """The file format of images."""

    format: Literal["png", "webp", "jpeg"] = "png"
    """File format: `png`, `webp` or `jpeg`."""
    quality: Annotated[int, Field(ge=1, le=100)] | None = None
    """Quality of JPEG and lossy WebP, 1 to 100; 95 if left out."""
    lossless: bool = False
    """Whether WebP files are lossless."""
    encode_cpus: Annotated[float, Field(gt=0.0)] = 1.0
    """CPUs that one encoding task reserves."""

    @model_validator(mode="after")
    def _fits(self) -> ImageFileConfig:
        if self.lossless and self.format == "jpeg":
            raise ValueError("lossless: JPEG always loses something; use png or webp")
        if self.quality is not None and (self.format == "png" or self.lossless):
            raise ValueError(f"quality: nothing is lost in {'PNG' if self.format == 'png' else 'lossless WebP'}")
        return self


class ImageSinkConfig(SinkConfig):
    """The output: images, codes, or both."""

    rows_per_file: Annotated[int, Field(ge=1)] = 1000
    """Maximum number of rows of one Parquet file."""
    images: bool = True
    """Whether images are decoded and written."""
    keep_codes: bool = True
    """Whether codes are written."""
    exports: Annotated[tuple[ExportConfig, ...], Field(strict=False)] = ()
    """Further [forms](../guides/output.md#exports) of the results, which are written when all rows are published."""

    @model_validator(mode="after")
    def _something(self) -> ImageSinkConfig:
        if not self.images and not self.keep_codes:
            raise ValueError("images and keep_codes are both false: nothing would be left of an image")
        return self


class ImageJobSectionConfig(JobSectionConfig):
    """Name, seed, Ray cluster, error limits and logs of the job."""

    name: str = "synthesize"
    """Prefix of the job's id."""


class SynthesizeJobConfig(DatasetJobConfig):
    """A synthesis job: prompts or conditions in, images out."""

    _sink_content: ClassVar[tuple[str, ...]] = ("keep_columns", "images", "keep_codes")
    source: SourceConfig
    prompt: Annotated[ImagePromptConfig | None, SHORT_PROMPT] = None
    columns: ImageColumnsConfig = ImageColumnsConfig()
    model: ImageModelConfig
    method: MethodConfig = MethodConfig()
    sampling: ImageSamplingConfig = ImageSamplingConfig()
    pool: EnginePoolConfig = EnginePoolConfig()
    vq: VqPoolConfig = VqPoolConfig()
    """The pool of VQ decoders; `num_gpus` is a share of one GPU, 0 is the CPU, `auto` a tenth of an engine's GPU."""
    image: ImageFileConfig = ImageFileConfig()
    sink: ImageSinkConfig
    job: ImageJobSectionConfig = ImageJobSectionConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> SynthesizeJobConfig:
        if self.source.kind in ("images", "videos"):
            what = self.source.kind.removesuffix("s")
            raise ValueError(f"source.kind: {what} files hold no prompts; use parquet, jsonl, text or webdataset")
        for name in ("image", "video"):
            if getattr(self.source.columns, name) is not None:
                raise ValueError(f"source.columns.{name}: no {name} is read by a job that makes images")
        self._check_condition()
        self._check_method()
        number = self.sampling.num_images_per_prompt
        if number > 1 and self.sampling.temperature == 0 and self.columns.temperature is None:
            raise ValueError(f"sampling.num_images_per_prompt is {number}, and at temperature 0 all are the same image")
        if self.sink.images and self.model.vq is None:
            raise ValueError("model.vq must name the VQ model that decodes images; or set sink.images: false")
        return self

    def _check_condition(self) -> None:
        ready = [name for name in ("features", "label") if getattr(self.columns, name) is not None]
        if len(ready) == 2:
            raise ValueError("columns: give features or label, and not both: a target is made for one of them")
        if self.has_negatives:
            self._check_negatives()
        elif ready and self.model.condition is not None:
            raise ValueError(f"model.condition: it would encode nothing, because rows have columns.{ready[0]}")
        if not ready and self.prompt is None:
            raise ValueError("prompt is required unless columns.features or columns.label is given")
        if not ready and self.model.condition is None:
            raise ValueError("model.condition must name the T5 encoder; or give columns.features or columns.label")

    def _check_negatives(self) -> None:
        where = "columns" if self.sampling.negative_prompt is None else "sampling"
        if not self.is_guided:
            scale = self.sampling.guidance_scale
            raise ValueError(
                f"{where}.negative_prompt: guidance leads away from it, and sampling.guidance_scale {scale:g} is off"
            )
        if self.columns.label is not None:
            raise ValueError(f"{where}.negative_prompt: targets with columns.label have no text")
        if self.model.condition is None:
            raise ValueError(f"{where}.negative_prompt: model.condition must name the T5 encoder that encodes it")

    def _check_method(self) -> None:
        method = self.method
        if any(candidate.contexts != (FullContextConfig(),) for candidate in method.methods):
            raise ValueError("method.contexts: a prompt for an image has no visual part to change; leave them out")
        if any(getattr(candidate.drafter, "vocabulary", None) is not None for candidate in method.methods):
            raise ValueError("method.drafter.vocabulary keeps the tokens of texts, and an image is made of codes")
        if any(isinstance(candidate.drafter, BlockDrafterConfig) for candidate in method.methods):
            raise ValueError("method.drafter 'block' drafts texts: it counts positions in one dimension; use eagle3")
        if method.needs_mtp:
            raise ValueError("method.drafter 'mtp': models that write images have no MTP layers; use eagle or eagle3")
        if any(candidate.drafts_grammar for candidate in method.methods):
            raise ValueError("method: drafts of a grammar follow the section output, and images have none")
        if isinstance(method.acceptance, LVSpecAcceptanceConfig):
            raise ValueError("method.acceptance 'lvspec' compares drafts with images in the prompt, and there are none")
        if isinstance(method.acceptance, LanternAcceptanceConfig) and self.model.vq is None:
            raise ValueError("method.acceptance 'lantern' finds neighbours in a codebook: model.vq must name its model")

    @property
    def has_negatives(self) -> bool:
        """Whether any row may have a negative prompt."""
        return self.sampling.negative_prompt is not None or self.columns.negative_prompt is not None

    @property
    def is_guided(self) -> bool:
        """Whether any row may use guidance, so that the models need an unconditional lane."""
        return self.sampling.guidance_scale > 1.0 or self.columns.guidance_scale is not None

    def content(self, revisions: dict[str, str]) -> dict[str, Any]:
        """See `DatasetJobConfig.content`."""
        data = super().content(revisions)
        del data["vq"]
        for section in ("sampling", "columns"):  # outputs that are older than the key have the same content without it
            if data[section]["negative_prompt"] is None:
                del data[section]["negative_prompt"]
        data["image"] = {**data["image"], "encode_cpus": None} if self.sink.images else None
        return data
