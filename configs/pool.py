"""Defines how a job runs: the sections `pool` (number, resources and limits of actors) and `job` (cluster, logs)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from configs.section import Labels, NumGpus, Section


class ActorPoolConfig(Section):
    """Number and resources of the actors; each actor holds its own models."""

    _most_gpus: ClassVar[int] = 1
    min_size: Annotated[int, Field(ge=1)] = 1
    """Minimum number of actors."""
    max_size: Annotated[int, Field(ge=1)] = 1
    """Maximum number of actors."""
    initial_size: Annotated[int, Field(ge=1)] | None = None
    """Number of actors at the start, if more than `min_size`."""
    num_gpus: NumGpus = "auto"
    """GPUs of one actor: a share of one GPU, or several GPUs over which the target's layers are
    [spread](../guides/cluster.md#large-targets); 0 runs on the CPU. `auto` [chooses](../guides/sizing.md#gpus) for all
    pools of the job: a GPU if there is one, or a share of it, else 0."""
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
        if self.gpus > self._most_gpus:
            raise ValueError(f"num_gpus ({self.gpus:g}) is more than one: these actors' models run on one GPU")
        if self.gpus > 1 and not self.gpus.is_integer():
            raise ValueError(f"num_gpus ({self.gpus:g}) must be a share of one GPU, or a whole number of them")
        return self

    @property
    def gpus(self) -> float:
        """`num_gpus`, or 0 while it is `auto` (see `pipeline.resources`)."""
        return 0.0 if self.num_gpus == "auto" else self.num_gpus


MAX_ROWS = 4096
"""Maximum number of slots of an engine, and of rows of a batch."""
MIN_BATCH_ROWS = 32
"""Minimum number of rows of a batch if `batch_rows` is `auto`."""


class EnginePoolConfig(ActorPoolConfig):
    """Actors with one loaded pair and one engine each; several batches share an engine."""

    slots: int | Literal["auto"] = 16
    """Samples that one engine decodes at once; `auto`: the number that [fits into memory](../guides/sizing.md#memory).
    """
    batch_rows: int | Literal["auto"] = "auto"
    """Maximum number of rows of one Ray batch; `auto`: 32 to 512, by the number of rows, actors and slots."""
    max_batches_in_flight: Annotated[int, Field(ge=1, le=64)] = 2
    """Batches that feed one engine at once."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens of one prefill forward, padding included, which bounds its memory; a longer prompt runs alone."""
    max_step_s: Annotated[float, Field(gt=0.0)] | None = 600.0
    """Longest engine step, and longest processor call in a decoding task. A longer one ends its process, and the rows
    run again; `null` is no limit."""
    max_row_s: Annotated[float, Field(gt=0.0)] | None = None
    """Longest time of a row in its slot; a row that takes longer is a row error."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile layers at their first use: `always`, `never`, or `auto` for pairs whose largest decoder has at least
    256 MiB of weights. On a GPU it fuses the layers of captured steps. Needs a C++ compiler; without one, forwards run
    uncompiled."""
    capture: Literal["auto", "always", "never"] = "auto"
    """Capture steps as CUDA graphs and replay them: `always` (`true`), `never` (`false`), or `auto` for models on one
    GPU."""

    @property
    def rows_per_batch(self) -> int:
        """`batch_rows`, or the least number of rows while it is `auto` (see `pipeline.run.job_plan`)."""
        return MIN_BATCH_ROWS if self.batch_rows == "auto" else self.batch_rows

    @field_validator("capture", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {True: "always", False: "never"}[value] if isinstance(value, bool) else value

    @field_validator("slots", "batch_rows", mode="plain")
    @classmethod
    def _count_or_auto(cls, value: Any) -> Any:
        """Accept an integer or `auto`, with the error messages of other numbers, which a union type would not give."""
        if value == "auto":
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise PydanticCustomError("int_or_auto", "Input should be a valid integer, or auto")
        if value < 1:
            raise PydanticKnownError("greater_than_equal", {"ge": 1})
        if value > MAX_ROWS:
            raise PydanticKnownError("less_than_equal", {"le": MAX_ROWS})
        return value


class PoolConfig(EnginePoolConfig):
    """The actors of a caption job; the target's layers are spread over all GPUs of an actor."""

    _most_gpus: ClassVar[int] = 64
    max_context_tokens: Annotated[int, Field(ge=16)] = 2048
    """Maximum number of tokens of prompt, images and output together; a row that needs more is a row error."""
    feature_cache_bytes: Annotated[int, Field(ge=0)] = 256 * 1024**2
    """Size of the cache of visual features and their pixels, for each model of a pair; later prompts about the same
    image or video reuse them. 0 is off."""
    processor: Literal["auto", "tasks", "actor"] = "auto"
    """Where the target's processor runs: in decoding `tasks`, ahead of the engine, or in the `actor`, beside it; `auto`
    is `tasks` for GPU actors that read images or videos. See [sizing](../guides/sizing.md#processors)."""
    decode_cpus: Annotated[float, Field(gt=0.0)] = 0.9
    """CPUs that one decoding task reserves. The default leaves a tenth of each CPU to the tasks that cut blocks."""
    decode_label_selector: Labels | None = None
    """Labels of nodes for tasks that read and decode rows, in the format of `label_selector`."""
    max_ahead_bytes: Annotated[int, Field(ge=1024**2)] = 4 * 1024**3
    """Maximum number of bytes of rows that are read and decoded ahead of the actors."""


class AcceptanceDropConfig(Section):
    """The drop of the acceptance length that counts as [drift](../guides/monitoring.md#drift)."""

    max_drop: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    """Largest relative drop below the acceptance length of the job's first rows, over all rows or those of one folder
    of the source."""
    min_rows: Annotated[int, Field(ge=16)] = 256
    """Rows of a window, and of the job's first rows."""


class JobSectionConfig(Section):
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
    max_error_share: Annotated[float, Field(ge=0.0, lt=1.0)] | None = 0.5
    """Largest share of failed rows. If more rows have failed, a running job ends, and a finished job with at least 20
    rows counts as failed, both with [exit status](commands.md#exit-status) 3. `null` is no limit."""
    error_share_min_rows: Annotated[int, Field(ge=1)] = 1000
    """Minimum number of finished rows at which `max_error_share` ends a running job."""
    drift: AcceptanceDropConfig | None = AcceptanceDropConfig()
    """When a drop of acceptance is reported; `null` is never."""
    max_silence_s: Annotated[float, Field(ge=1.0)] | None = 300.0
    """Longest time without a heartbeat of a worker process; a process that is stopped or frozen for longer is killed,
    and its rows run elsewhere. `null` is no limit."""
    log: Literal["text", "json"] = "text"
    """`json`: events on standard error, one JSON object per line, with job, attempt and sample ids; see
    [monitoring](../guides/monitoring.md#structured-logs)."""
