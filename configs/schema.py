"""The schema of a job file: one YAML is one job, strict in every key, refused before anything expensive starts.

Knows the legal values and which choices go together; knows nothing of how a choice is built (that is
`actors.loading.pair`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from configs.acceptance import LanternAcceptance
from configs.method import Method
from configs.section import Device, Labels, Place, Section, without_credentials
from configs.video import Video

# --- source and prompt ---------------------------------------------------------------------------------------------


class SourceColumns(Section):
    """Which columns hold what."""

    image: str | None = None
    """Encoded bytes, URIs, `struct<bytes, path>`, or lists of those. Tars: by extension."""
    video: str | None = None
    """The same for videos."""


URI_SCHEMES = ("file", "data", "http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf")
"""What URIs inside rows may be told to use: schemes whose drivers reach nothing but files."""


def _known_scheme(value: str) -> str:
    if value not in URI_SCHEMES:
        raise ValueError(f"{value!r} is none of {', '.join(URI_SCHEMES)}")
    return value


class Fetch(Section):
    """How media that rows name by URI are fetched."""

    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 30.0
    """Of one attempt over http or https, redirects included."""
    max_attempts: Annotated[int, Field(ge=1, le=20)] = 4
    max_parallel: Annotated[int, Field(ge=1, le=256)] = 16
    """Of one decoding task."""
    private_hosts: tuple[str, ...] = ()
    """Hosts, with or without a port, that may have addresses of private networks; all others must be public."""


MAX_IMAGES_PER_ROW = 64
MAX_DECODED_BYTES = 1536 * 1024**2


class Source(Section):
    """Where samples come from."""

    kind: Literal["parquet", "images", "videos", "webdataset", "jsonl", "csv", "text", "hf", "lance"]
    path: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], AfterValidator(without_credentials)]
    """A file, a folder or a glob, or a list of those in one store; any fsspec URL."""
    columns: SourceColumns = SourceColumns()
    id_column: str | None = None
    """The user's own unique id; without it the id is the path relative to the source root and the row's index."""
    check_ids: bool = True
    """Read all ids before the job starts, so that a row whose id an earlier row has is an error row. In
    tars the later row becomes one when the job is done."""
    delimiter: Annotated[str, Field(pattern=r"^[^\"\r\n]$")] | None = None
    """What separates the fields of CSV; by default a tab in `.tsv` files and a comma in others."""
    span_max_rows: Annotated[int, Field(ge=1)] = 1000
    span_max_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    uri_schemes: tuple[Annotated[str, AfterValidator(_known_scheme)], ...] = ("file",)
    """Schemes that URIs inside rows may use; a path without a scheme is relative to the source root."""
    local_roots: tuple[Annotated[str, Field(pattern="^/")], ...] = ()
    """Folders besides the source root in which rows and links may name files of the machine; absolute paths."""
    fetch: Fetch = Fetch()
    max_image_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    max_image_pixels: Annotated[int, Field(ge=1)] = 64_000_000
    max_images_per_row: Annotated[int, Field(ge=1, le=10_000)] = MAX_IMAGES_PER_ROW
    """A row with more images is a row error."""
    max_side_px: Annotated[int, Field(ge=16)] | Literal["auto"] | None = "auto"
    """Images and frames with a longer side are shrunk to it while they are decoded. `auto` takes a bound beyond what
    the target's processor makes use of; null shrinks nothing."""
    max_decoded_bytes: Annotated[int, Field(ge=16 * 1024**2)] = MAX_DECODED_BYTES
    """Memory of one decoding task: its rows' images, encoded and decoded. Rows beyond it go to other tasks; the images
    of one row may take a sixth of it. Videos have `video.max_decoded_bytes`."""
    video: Video = Video()

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a list."""
        return (self.path,) if isinstance(self.path, str) else self.path


class Message(Section):
    """One turn of the conversation; `text` may hold `{column}` placeholders."""

    role: Literal["system", "user", "assistant"]
    text: str
    images: bool | None = None
    """Whether this turn carries the row's images; by default the first user turn does."""


class Prompt(Section):
    """What the model is asked: a single user text, or messages."""

    text: str | None = None
    messages: Annotated[tuple[Message, ...], Field(strict=False)] = ()
    """Lists are taken too, because the short form of `prompt` has this section validated as Python data."""

    @model_validator(mode="after")
    def _one_of(self) -> Prompt:
        if (self.text is None) == (not self.messages):
            raise ValueError("give either prompt.text or prompt.messages, and not both")
        if self.messages and self.messages[-1].role != "user":
            raise ValueError("prompt.messages must end with a user turn, which the model then answers")
        return self


class RowColumns(Section):
    """Columns that say how a row is asked and answered; a row without a value of its own takes the job's."""

    prompts: str | None = None
    """Several prompts for one sample: a list, each of which is a row of the output, and `{prompt}` in the template."""
    messages: str | None = None
    """A conversation, in place of `prompt`."""
    seed: str | None = None
    temperature: str | None = None
    top_k: str | None = None
    top_p: str | None = None
    repetition_penalty: str | None = None
    max_new_tokens: str | None = None


# --- model ---------------------------------------------------------------------------------------------------------


class Weights(Section):
    """One network's files, and where and in which type they are loaded."""

    path: Place
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Device = "auto"
    """`auto` is the first CUDA device where there is one, and the CPU elsewhere."""


class Checkpoint(Weights):
    """One model: a folder written by `save_pretrained`, or a hub id."""

    allow_remote_code: bool = False


class TargetCheckpoint(Checkpoint):
    """The model whose distribution counts."""

    quantization: Literal["none", "int8", "fp8"] = "none"
    """`int8`, `fp8`: the decoder's weights are rounded when they are loaded, and the rounded model is the target. With
    `fp8`, on a GPU that has it, what they are multiplied by is rounded as well."""

    @model_validator(mode="after")
    def _multiplied(self) -> TargetCheckpoint:
        if self.quantization == "int8" and self.device == "cpu" and self.dtype in ("float32", "float16"):
            raise ValueError(
                f"quantization int8 is multiplied fast on a CPU with bfloat16 only, and dtype is '{self.dtype}'"
            )
        if self.quantization == "fp8" and self.device == "cpu":
            raise ValueError("quantization fp8 takes a GPU, and device is 'cpu'; on a CPU there is int8")
        return self


class Model(Section):
    """The pair: the target whose distribution counts, and the drafter that guesses ahead."""

    target: TargetCheckpoint
    drafter: Checkpoint | None = None


class Sampling(Section):
    """How tokens are chosen; see `decoding.Sampling`."""

    max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 256
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    ignore_eos: bool = False


# --- running -------------------------------------------------------------------------------------------------------


class ActorPool(Section):
    """Actors that each hold a model: how many, and what each of them gets."""

    _most_gpus: ClassVar[int] = 1
    min_size: Annotated[int, Field(ge=1)] = 1
    max_size: Annotated[int, Field(ge=1)] = 1
    initial_size: Annotated[int, Field(ge=1)] | None = None
    """Actors at the start, where that is more than `min_size`."""
    batch_rows: Annotated[int, Field(ge=1)] = 32
    num_gpus: Annotated[float, Field(ge=0.0)] = 0.0
    torch_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of one CPU actor; by default the machine's cores shared among `max_size` actors."""
    accelerator_type: str | None = None
    label_selector: Labels | None = None
    """Which nodes may hold the actors."""

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.max_size < self.min_size:
            raise ValueError(f"max_size ({self.max_size}) is smaller than min_size ({self.min_size})")
        if self.initial_size is not None and not self.min_size <= self.initial_size <= self.max_size:
            raise ValueError(
                f"initial_size ({self.initial_size}) is not between min_size ({self.min_size}) and max_size "
                f"({self.max_size})"
            )
        if self.num_gpus > self._most_gpus:
            raise ValueError(
                f"num_gpus ({self.num_gpus:g}) is more than one: these actors' models run on one GPU, and others would "
                "stand idle"
            )
        if self.num_gpus > 1 and not self.num_gpus.is_integer():
            raise ValueError(f"num_gpus ({self.num_gpus:g}) must be a share of one GPU, or a whole number of them")
        return self


MOST_SLOTS = 4096
"""Of one engine."""


class EnginePool(ActorPool):
    """Actors with one pair and one engine each, which several batches feed at once."""

    slots: int | Literal["auto"] = 16
    """`auto`: as many as fit into the memory that is free when an actor has loaded its models."""
    max_batches_in_flight: Annotated[int, Field(ge=1, le=64)] = 4
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Columns of one forward over prompts, padding included: a bound on what admitting rows takes in memory. A longer
    prompt runs alone."""
    max_step_s: Annotated[float, Field(gt=0.0)] | None = 600.0
    """A step of the engine that takes longer ends its process, which counts as a death for its rows."""
    max_row_s: Annotated[float, Field(gt=0.0)] | None = None
    """A row that is in its slot for longer becomes an error row."""
    compile: Literal["auto", "always", "never"] = "auto"
    """On a CPU: compile every kind of forward at its first use. `auto` decides when an actor starts, by the size of the
    weights, and compiles where the machine can."""
    capture: bool = False
    """On one GPU: record steps as CUDA graphs and replay them. Not tried on a GPU yet."""

    @field_validator("slots", mode="plain")
    @classmethod
    def _slots(cls, value: Any) -> Any:
        """A number, or `auto`; refused in the words that other numbers are refused with."""
        if value == "auto":
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise PydanticCustomError("int_or_auto", "Input should be a valid integer, or auto")
        if value < 1:
            raise PydanticKnownError("greater_than_equal", {"ge": 1})
        if value > MOST_SLOTS:
            raise PydanticKnownError("less_than_equal", {"le": MOST_SLOTS})
        return value


class Pool(EnginePool):
    """The actors of a caption job; the target's layers are spread over all GPUs of one."""

    _most_gpus: ClassVar[int] = 64
    max_context_tokens: Annotated[int, Field(ge=16)] = 2048
    """Prompt, images and generated tokens together; a row that needs more becomes an error row."""
    feature_cache_bytes: Annotated[int, Field(ge=0)] = 256 * 1024**2
    """Visual features, and the pixels that they are known by, that each model of a pair keeps for later prompts about
    the same image or video; 0 keeps none."""
    decode_cpus: Annotated[float, Field(gt=0.0)] = 1.0
    decode_label_selector: Labels | None = None
    """Which nodes may read and decode."""
    max_ahead_bytes: Annotated[int, Field(ge=1024**2)] = 4 * 1024**3
    """How far reading and decoding may run ahead of the actors: bytes of all blocks between files and results."""


class Sink(Section):
    """Where results go: `data/`, `errors/` and `_job/` under `path`."""

    path: Place
    keep_columns: tuple[str, ...] = ()
    """Input columns that travel through into every output row."""
    rows_per_file: Annotated[int, Field(ge=1)] = 10_000
    max_unsaved_seconds: Annotated[float, Field(ge=0.0, le=86_400.0)] = 300.0
    """A finished row is durable after so long at most, and in a file of `data/` when that is full."""
    compression: Literal["zstd", "snappy", "none"] = "zstd"


class Job(Section):
    """The run itself."""

    name: str = "caption"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    ray_address: str = "local"
    """`local` starts a private Ray on this machine, `auto` joins the cluster it was submitted to; or an address."""
    num_cpus: Annotated[int, Field(ge=1)] | None = None
    """Logical CPUs of a local Ray; by default the machine's cores, and never fewer than 2."""
    progress: bool = True
    max_error_share: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """End the job, resumable, when a larger share of its rows has failed."""
    error_share_min_rows: Annotated[int, Field(ge=1)] = 1000
    """Rows that must be done before their share of errors counts."""
    max_silence_s: Annotated[float, Field(ge=1.0)] | None = 300.0
    """A worker process that is stopped or frozen for so long is killed and replaced; `null` waits for ever."""
    log: Literal["text", "json"] = "text"
    """`json`: every process says what happens as one JSON object per line; the driver prints no other process's."""


class CaptionJob(Section):
    """A whole caption job."""

    source: Source
    prompt: Prompt | None = None
    columns: RowColumns = RowColumns()
    model: Model
    method: Method = Method()
    sampling: Sampling = Sampling()
    pool: Pool = Pool()
    sink: Sink
    job: Job = Job()

    @field_validator("prompt", mode="before")
    @classmethod
    def _short_prompt(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _asked(self) -> CaptionJob:
        if (self.prompt is None) == (self.columns.messages is None):
            raise ValueError("give either prompt or columns.messages, and not both")
        if self.columns.prompts is not None and self.prompt is None:
            raise ValueError("columns.prompts fill the template of prompt; a conversation is asked once")
        return self

    @model_validator(mode="after")
    def _pair(self) -> CaptionJob:
        drafter = self.method.drafting.drafter
        if self.method.needs_checkpoint and self.model.drafter is None:
            raise ValueError(f"method.drafter.kind is '{drafter.kind}', so model.drafter must name a checkpoint")
        if isinstance(self.method.acceptance, LanternAcceptance):
            raise ValueError(
                "method.acceptance 'lantern' takes codes for others that look like them, and a text has none"
            )
        return self

    @model_validator(mode="after")
    def _spread(self) -> CaptionJob:
        if self.pool.num_gpus > 1 and self.model.target.device != "auto":
            raise ValueError(
                f"model.target.device is '{self.model.target.device}', but with pool.num_gpus "
                f"{self.pool.num_gpus:g} its layers are spread over the actor's GPUs; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _rounded(self) -> CaptionJob:
        if self.model.target.quantization != "none" and self.pool.compile == "always":
            raise ValueError(
                f"model.target.quantization is '{self.model.target.quantization}', and such weights are not compiled; "
                "take pool.compile 'auto' or 'never'"
            )
        return self

    @property
    def multiplies_rows(self) -> bool:
        """Whether one sample may become several rows: clips of its video, or several prompts."""
        return self.source.video.clip_s is not None or self.columns.prompts is not None

    def resolved(self) -> dict[str, Any]:
        """The whole configuration as plain JSON data, defaults filled in."""
        return self.model_dump(mode="json")

    def content(self, revisions: dict[str, str]) -> dict[str, Any]:
        """All that decides what the output holds: source, prompt, models, method, sampling, seed.

        Sizes of pools, files and spans, how long is waited, and where the job runs are left out on purpose: they may
        change between attempts.
        """
        data = self.resolved()
        del data["pool"]
        data["job"] = {"seed": self.job.seed}
        data["sink"] = {"keep_columns": data["sink"]["keep_columns"]}
        data["method"] = self.method.content()
        return without_circumstances({**data, "revisions": revisions})

    def fingerprint(self, revisions: dict[str, str]) -> str:
        """A short hash of `content`."""
        return hash_of(self.content(revisions))


# --- what makes two jobs the same ----------------------------------------------------------------------------------


def without_circumstances(content: dict[str, Any]) -> dict[str, Any]:
    """A job's content without the fields of its sections that say how it is had and on what it is made."""
    for name in ("span_max_rows", "span_max_bytes", "fetch", "local_roots", "max_decoded_bytes"):
        del content["source"][name]
    for name in ("worker_max_videos", "worker_max_bytes"):
        del content["source"]["video"][name]
    for weights in content["model"].values():
        if weights is not None:
            del weights["device"]
    return content


def hash_of(content: dict[str, Any]) -> str:
    """16 hex digits over plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
