"""Defines the schema of a caption job, and the sections that all jobs share."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from configs.acceptance import LanternAcceptance
from configs.method import Method
from configs.section import Device, Labels, Place, Section, without_credentials
from configs.video import Video

# --- source and prompt ---------------------------------------------------------------------------------------------


class SourceColumns(Section):
    """Columns of the source that contain images or videos."""

    image: str | None = None
    """Parquet: encoded bytes, URIs, `struct<bytes, path>`, or lists of them; JSONL: URIs or lists; CSV: URIs."""
    video: str | None = None
    """The same formats for videos; a row may have images and videos."""


UriScheme = Literal["file", "data", "http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf"]
"""Schemes of URIs in rows; the drivers of these schemes access only files."""


class Fetch(Section):
    """How media are fetched by URI."""

    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 30.0
    """Seconds of one attempt over http or https, redirects included."""
    max_attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Attempts at a URI, with growing waits; only transient errors are retried."""
    max_parallel: Annotated[int, Field(ge=1, le=256)] = 16
    """URIs that one decoding task fetches at once."""
    private_hosts: tuple[str, ...] = ()
    """Hosts (`name` or `name:port`) that may have private addresses; all others must be public."""


MAX_IMAGES_PER_ROW = 64
MAX_DECODED_BYTES = 1536 * 1024**2


class Source(Section):
    """The input data: format, location, columns, and limits of its rows."""

    kind: Literal["parquet", "images", "videos", "webdataset", "jsonl", "csv", "text", "hf", "lance"]
    """`parquet`, `images`, `videos` (files of a folder or glob), `webdataset` (tar shards), `jsonl`, `csv`, `text` (one
    prompt per line), `hf` (folders of Hugging Face's `datasets`), `lance` (where its library is installed); see
    [sources](../guides/sources.md)."""
    path: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], AfterValidator(without_credentials)]
    """A file, folder or glob, as a local path or any fsspec URL; or a list of them in one store."""
    columns: SourceColumns = SourceColumns()
    id_column: str | None = None
    """The column (in tars: the field) with unique ids; if left out, ids are `path#index`."""
    check_ids: bool = True
    """Read all ids before the job starts, so that rows with repeated ids become error rows; ids in tars are checked at
    the end."""
    delimiter: Annotated[str, Field(pattern=r"^[^\"\r\n]$")] | None = None
    """CSV only: the field separator; by default a tab in `.tsv` files and a comma in others."""
    span_max_rows: Annotated[int, Field(ge=1)] = 1000
    """Most rows of one read task; a Parquet row group of small rows is not split up to 64 times this number."""
    span_max_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    """Most bytes of one read task. Parquet files are split at row groups and inside larger row groups, text files
    between records, and plain tars between samples; a compressed tar is one task."""
    uri_schemes: tuple[UriScheme, ...] = ("file",)
    """Schemes of URIs in rows (`file`, `data`, `http`, `https`, `s3`, `gs`, `gcs`, `az`, `abfs`, `abfss`, `hf`); a path
    without one is relative to the source root."""
    local_roots: tuple[Annotated[str, Field(pattern="^/")], ...] = ()
    """Absolute paths of folders, besides the source root, in which rows and links may name local files."""
    fetch: Fetch = Fetch()
    max_image_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    """Most bytes of an image file; a larger file is a row error."""
    max_image_pixels: Annotated[int, Field(ge=1)] = 64_000_000
    """Most pixels of an image or a video frame; a larger one is a row error."""
    max_images_per_row: Annotated[int, Field(ge=1, le=10_000)] = MAX_IMAGES_PER_ROW
    """A row with more images is a row error."""
    max_side_px: Annotated[int, Field(ge=16)] | Literal["auto"] | None = "auto"
    """Longest side of images and frames; larger ones are resized during decoding. `auto` is a bound above the size that
    the target's processor uses; `null` disables resizing."""
    max_decoded_bytes: Annotated[int, Field(ge=16 * 1024**2)] = MAX_DECODED_BYTES
    """Memory of one decoding task for encoded and decoded images. Further rows go to other tasks; the images of one row
    may use a sixth of it."""
    video: Video = Video()

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


class Message(Section):
    """One turn of the conversation; `text` may contain `{column}` placeholders."""

    role: Literal["system", "user", "assistant"]
    """`system`, `user` or `assistant`; the last turn is the user's."""
    text: str
    """The turn's text; `{column}` is replaced by the row's value, `{{` by a brace."""
    images: bool | None = None
    """Whether this turn carries the row's images; by default the first user turn does."""


class Prompt(Section):
    """The prompt: either the text of a single user turn, or messages."""

    text: str | None = None
    """One user turn; `prompt: some text` is its short form."""
    # Not strict, because the short form is validated as Python data, in which lists are not accepted for tuples.
    messages: Annotated[tuple[Message, ...], Field(strict=False)] = ()
    """The turns of a conversation."""

    @model_validator(mode="after")
    def _one_of(self) -> Prompt:
        if (self.text is None) == (not self.messages):
            raise ValueError("give either prompt.text or prompt.messages, and not both")
        if self.messages and self.messages[-1].role != "user":
            raise ValueError("prompt.messages must end with a user turn, which the model then answers")
        return self


class RowColumns(Section):
    """Columns with prompts and sampling options per row; a row without a value uses the job's value."""

    prompts: str | None = None
    """Several prompts per sample: a list, or its JSON. Each prompt is `{prompt}` in the template and yields an output
    row with the id `<id>#0`, `<id>#1`, …."""
    messages: str | None = None
    """A conversation, or its JSON, that ends with a user turn; replaces `prompt`."""
    seed: str | None = None
    """The row's seed."""
    temperature: str | None = None
    """In place of `sampling.temperature`."""
    top_k: str | None = None
    """In place of `sampling.top_k`."""
    top_p: str | None = None
    """In place of `sampling.top_p`."""
    repetition_penalty: str | None = None
    """In place of `sampling.repetition_penalty`."""
    max_new_tokens: str | None = None
    """In place of `sampling.max_new_tokens`."""


def _short_prompt(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


SHORT_PROMPT = BeforeValidator(_short_prompt)
"""Validator that accepts a string in place of a section with the key `text`."""


# --- model ---------------------------------------------------------------------------------------------------------


class Weights(Section):
    """The checkpoint of one network, and the dtype and device of its weights."""

    path: Place
    """A folder written by `save_pretrained`, a hub id, or a folder in an [object store](../guides/storage.md#weights).
    """
    revision: str | None = None
    """A commit, tag or branch of the hub; for a local folder or an object store, the hash that a dry run prints."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` (as stored), `float32`, `bfloat16`, `float16`."""
    device: Device = "auto"
    """`auto` is the first CUDA device if there is one, else the CPU."""


class Checkpoint(Weights):
    """One model: a folder written by `save_pretrained`, or a hub id."""

    allow_remote_code: bool = False
    """Whether code that comes with the checkpoint may run."""


class TargetCheckpoint(Checkpoint):
    """The target model, whose distribution a lossless method preserves."""

    quantization: Literal["none", "int8", "fp8"] = "none"
    """`int8`, or on a GPU `fp8`: the decoder's weights are [rounded](../guides/sizing.md#memory) when loaded; the
    rounded model is then the target."""

    @model_validator(mode="after")
    def _multiplied(self) -> TargetCheckpoint:
        if self.quantization == "int8" and self.device == "cpu" and self.dtype in ("float32", "float16"):
            raise ValueError(f"quantization int8 on a CPU takes the dtype bfloat16, and dtype is '{self.dtype}'")
        if self.quantization == "fp8" and self.device == "cpu":
            raise ValueError("quantization fp8 takes a GPU, and device is 'cpu'; on a CPU there is int8")
        return self


class Model(Section):
    """The target model and the checkpoint of its drafter."""

    target: TargetCheckpoint
    drafter: Checkpoint | None = None
    """A smaller model, an EAGLE head or Medusa heads for the target; not needed by the drafters `none` and `lookup`."""


class Sampling(Section):
    """Sampling parameters of generated text; see `decoding.Sampling`."""

    max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Most generated tokens of a row."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Softmax temperature; 0 is greedy decoding."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Sample from this number of most likely tokens; 0 is off."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the most likely tokens with this total probability; 1 is off."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """Penalty on tokens of the prompt and the output, as in transformers; 1 is off."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end the text; they are removed from it."""
    ignore_eos: bool = False
    """Continue after an EOS token."""


# --- running -------------------------------------------------------------------------------------------------------


class ActorPool(Section):
    """Number and resources of the actors; each actor holds its own models."""

    _most_gpus: ClassVar[int] = 1
    min_size: Annotated[int, Field(ge=1)] = 1
    """Least number of actors."""
    max_size: Annotated[int, Field(ge=1)] = 1
    """Most actors."""
    initial_size: Annotated[int, Field(ge=1)] | None = None
    """Number of actors at the start, if more than `min_size`."""
    batch_rows: Annotated[int, Field(ge=1)] = 32
    """Rows of one Ray batch."""
    num_gpus: Annotated[float, Field(ge=0.0)] = 0.0
    """GPUs of one actor: a share of one GPU, or several GPUs over which the target's layers are
    [spread](../guides/cluster.md#large-targets); 0 runs on the CPU."""
    torch_threads: Annotated[int, Field(ge=1)] | None = None
    """Torch threads of a CPU actor; by default an equal share of the cores among `max_size` actors."""
    accelerator_type: str | None = None
    """A Ray accelerator type, such as `H100`."""
    label_selector: Labels | None = None
    """Labels of nodes for actors, such as `{pool: gpu, zone: "in(a, b)"}`; `!` negates a condition."""

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        least, most = self.min_size, self.max_size
        if most < least:
            raise ValueError(f"max_size ({most}) is smaller than min_size ({least})")
        if self.initial_size is not None and not least <= self.initial_size <= most:
            raise ValueError(
                f"initial_size ({self.initial_size}) is not between min_size ({least}) and max_size ({most})"
            )
        if self.num_gpus > self._most_gpus:
            raise ValueError(f"num_gpus ({self.num_gpus:g}) is more than one: these actors' models run on one GPU")
        if self.num_gpus > 1 and not self.num_gpus.is_integer():
            raise ValueError(f"num_gpus ({self.num_gpus:g}) must be a share of one GPU, or a whole number of them")
        return self


MOST_SLOTS = 4096


class EnginePool(ActorPool):
    """Actors with one loaded pair and one engine each; several batches share an engine."""

    slots: int | Literal["auto"] = 16
    """Samples that one engine decodes at once; `auto`: the number that [fits into memory](../guides/sizing.md#memory).
    """
    max_batches_in_flight: Annotated[int, Field(ge=1, le=64)] = 4
    """Batches that feed one engine at once."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens of one prefill forward, padding included, which bounds its memory; a longer prompt runs alone."""
    max_step_s: Annotated[float, Field(gt=0.0)] | None = 600.0
    """Longest engine step. A longer step ends the actor's process, and its rows run again; `null` is no limit."""
    max_row_s: Annotated[float, Field(gt=0.0)] | None = None
    """Longest time of a row in its slot; a row that takes longer is a row error."""
    compile: Literal["auto", "always", "never"] = "auto"
    """On a CPU, compile layers at their first use: `always`, `never`, or `auto` for pairs whose largest decoder has at
    least 256 MiB of weights. Needs a C++ compiler; without one, forwards run eagerly."""
    capture: bool = False
    """On one GPU, capture steps as CUDA graphs and replay them; off by default, because it has never run on a GPU."""

    @field_validator("slots", mode="plain")
    @classmethod
    def _slots(cls, value: Any) -> Any:
        """Accept an integer or `auto`, with the error messages of other numbers, which a union type would not give."""
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
    """The actors of a caption job; the target's layers are spread over all GPUs of an actor."""

    _most_gpus: ClassVar[int] = 64
    max_context_tokens: Annotated[int, Field(ge=16)] = 2048
    """Most tokens of prompt, images and output together; a row that needs more is a row error."""
    feature_cache_bytes: Annotated[int, Field(ge=0)] = 256 * 1024**2
    """Size of the cache of visual features and their pixels, for each model of a pair; later prompts about the same
    image or video reuse them. 0 is off."""
    decode_cpus: Annotated[float, Field(gt=0.0)] = 1.0
    """CPUs that one decoding task reserves."""
    decode_label_selector: Labels | None = None
    """Labels of nodes for tasks that read and decode rows, in the format of `label_selector`."""
    max_ahead_bytes: Annotated[int, Field(ge=1024**2)] = 4 * 1024**3
    """Most bytes of rows that are read and decoded ahead of the actors."""


class Sink(Section):
    """The output: `data/`, `errors/` and `_job/` under `path`."""

    path: Place
    """The output directory; a job resumes an existing output."""
    keep_columns: tuple[str, ...] = ()
    """Input columns that are copied into every output row."""
    rows_per_file: Annotated[int, Field(ge=1)] = 10_000
    """Most rows of one Parquet file."""
    max_unsaved_seconds: Annotated[float, Field(ge=0.0, le=86_400.0)] = 300.0
    """Longest time until a finished row is durable; 0 writes rows at once."""
    compression: Literal["zstd", "snappy", "none"] = "zstd"
    """Compression of Parquet files: `zstd`, `snappy` or `none`."""


class Job(Section):
    """Name, seed, Ray cluster, error limits and logs of the job."""

    name: str = "caption"
    """Prefix of the job's id."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all sampling."""
    ray_address: str = "local"
    """`local` starts a private Ray instance, `auto` joins the cluster that the job was submitted to; or an address."""
    num_cpus: Annotated[int, Field(ge=1)] | None = None
    """Logical CPUs of a local Ray instance; by default the machine's cores, at least 2."""
    progress: bool = True
    """Whether a progress line is shown."""
    max_error_share: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Largest share of failed rows; the job ends if more rows have failed."""
    error_share_min_rows: Annotated[int, Field(ge=1)] = 1000
    """Least number of finished rows at which `max_error_share` applies."""
    max_silence_s: Annotated[float, Field(ge=1.0)] | None = 300.0
    """Longest time without a heartbeat of a worker process; a process that is stopped or frozen for longer is killed,
    and its rows run elsewhere. `null` is no limit."""
    log: Literal["text", "json"] = "text"
    """`json`: events on standard error, one JSON object per line, with job, attempt and sample ids; see
    [monitoring](../guides/monitoring.md#structured-logs)."""


CIRCUMSTANCES = ("span_max_rows", "span_max_bytes", "fetch", "local_roots", "max_decoded_bytes")
VIDEO_CIRCUMSTANCES = ("worker_max_videos", "worker_max_bytes")
"""Keys of `source` and `source.video` that do not affect the output."""


class DatasetJob(Section):
    """Base of the jobs that write a dataset; a job can resume the output of a job with equal `content`."""

    _sink_content: ClassVar[tuple[str, ...]] = ("keep_columns",)
    if TYPE_CHECKING:  # each job declares its sections, in its order
        method: Method
        model: Any
        job: Any

    @model_validator(mode="after")
    def _has_drafter(self) -> Self:
        if self.method.needs_checkpoint and self.model.drafter is None:
            kind = self.method.drafting.drafter.kind
            raise ValueError(f"method.drafter.kind is '{kind}', so model.drafter must name a checkpoint")
        return self

    def resolved(self) -> dict[str, Any]:
        """Return the whole configuration as plain JSON data, with defaults."""
        return self.model_dump(mode="json")

    def content(self, revisions: dict[str, str]) -> dict[str, Any]:
        """Return all fields that determine the output: source, prompt, models, method, sampling, seed.

        Pools, devices, limits of time and memory, and sizes of files and spans are excluded, because they may change
        between attempts.
        """
        data = self.resolved()
        del data["pool"]
        data["job"] = {"seed": self.job.seed}
        data["sink"] = {name: data["sink"][name] for name in self._sink_content}
        data["method"] = self.method.content()
        for name in CIRCUMSTANCES:
            del data["source"][name]
        for name in VIDEO_CIRCUMSTANCES:
            del data["source"]["video"][name]
        for weights in filter(None, data["model"].values()):
            del weights["device"]
        return {**data, "revisions": revisions}

    def fingerprint(self, revisions: dict[str, str]) -> str:
        """Return a short hash of `content`."""
        content = json.dumps(self.content(revisions), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class CaptionJob(DatasetJob):
    """A caption job: images, videos or text in, generated text out."""

    source: Source
    prompt: Annotated[Prompt | None, SHORT_PROMPT] = None
    columns: RowColumns = RowColumns()
    model: Model
    method: Method = Method()
    sampling: Sampling = Sampling()
    pool: Pool = Pool()
    sink: Sink
    job: Job = Job()

    @model_validator(mode="after")
    def _fits_together(self) -> CaptionJob:
        if (self.prompt is None) == (self.columns.messages is None):
            raise ValueError("give either prompt or columns.messages, and not both")
        if self.columns.prompts is not None and self.prompt is None:
            raise ValueError("columns.prompts fill the template of prompt; a conversation is asked once")
        if isinstance(self.method.acceptance, LanternAcceptance):
            raise ValueError("method.acceptance 'lantern' accepts codes of similar images, and a text has none")
        target, pool = self.model.target, self.pool
        if pool.num_gpus > 1 and target.device != "auto":
            raise ValueError(
                f"model.target.device is '{target.device}', but with pool.num_gpus {pool.num_gpus:g} its layers are "
                "spread over the actor's GPUs; leave it out"
            )
        if target.quantization != "none" and pool.compile == "always":
            raise ValueError(
                f"model.target.quantization is '{target.quantization}', and such weights are not compiled; take "
                "pool.compile 'auto' or 'never'"
            )
        return self

    @property
    def multiplies_rows(self) -> bool:
        """Whether one sample may become several rows: clips of its video, or several prompts."""
        return self.source.video.clip_s is not None or self.columns.prompts is not None
