"""Lists the resources that a job requests of Ray: its pools of actors, and its tasks (`pipeline.run.graph`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from configs.contexts import CaptionContextConfig
from configs.pool import ActorPoolConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig

AnyJob = CaptionJobConfig | SynthesizeJobConfig | TrainDrafterJobConfig

GPU_ACTOR_CPUS = 1.0
"""CPUs that an actor on a GPU reserves; actors on CPUs reserve none, because their torch threads are set."""
WORKER_CPUS = 1.0
"""CPUs of one training worker on CPUs; one on a GPU reserves none."""
READ_CPUS = 1.0
"""CPUs of one task that reads a span: Ray Data's default."""
PREPARE_CPUS = 0.5
"""CPUs of one task that prepares prompts. A resource request that differs from other stages prevents fusion."""


@dataclass(frozen=True)
class Actors:
    """A pool: `count` actors that start together, and at most `most`, with `gpus` each; None is `auto`."""

    where: str
    """The pool's path in the job file, such as `pool`."""
    gpus: float | None
    count: int = 1
    most: int = 1
    counted_by: str = "min_size"
    """The key that sets `count`."""
    accelerator_type: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    """The configured devices of the models by their paths in the job file; the first decides whether a GPU is used."""
    tenths: int = 10
    """Tenths of a GPU that these actors share if the actors of another pool run on it too."""
    shares: bool = True
    """Whether several of these actors may share a GPU."""
    cpus_with_gpu: float = GPU_ACTOR_CPUS
    cpus_without: float = 0.0
    """CPUs that each of them reserves."""

    @property
    def dotted(self) -> str:
        return f"{self.where}.num_gpus"

    @property
    def is_minor(self) -> bool:
        """Whether these actors take what others leave: VQ decoders, which also run on a CPU."""
        return self.tenths == 1

    @property
    def device(self) -> str:
        return next(iter(self.devices.values()), "auto")

    @property
    def can_use_gpu(self) -> bool:
        return not self.device.startswith(("cpu", "mps"))

    def cpus(self, gpus: float) -> float:
        return self.cpus_with_gpu if gpus else self.cpus_without


@dataclass(frozen=True)
class Tasks:
    """Tasks with `cpus` each, of which at least one must run; `where` is the dotted path of the number, empty if it is
    not configurable, and `labels_where` that of the labels."""

    what: str
    cpus: float
    where: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    labels_where: str = ""


def actors_of(job: AnyJob) -> list[Actors]:
    """Return the pools of a job."""
    if isinstance(job, TrainDrafterJobConfig):
        return [_workers(job)]
    devices = {f"model.{name}.device": model.device for name, model in job.model if model is not None and name != "vq"}
    captioners = {
        f"method.contexts.{index}.device": context.device
        for index, context in enumerate(job.method.contexts)
        if isinstance(context, CaptionContextConfig)
    }
    engines = _pool("pool", job.pool, devices | captioners)
    if not isinstance(job, SynthesizeJobConfig) or not job.sink.images or job.model.vq is None:
        return [engines]
    return [replace(engines, tenths=9), _pool("vq", job.vq, {"model.vq.device": job.model.vq.device}, 1)]


def _pool(where: str, pool: ActorPoolConfig, devices: Mapping[str, str], tenths: int = 10) -> Actors:
    starts = pool.initial_size or pool.min_size
    return Actors(
        where,
        None if pool.num_gpus == "auto" else pool.num_gpus,
        starts,
        pool.max_size,
        "min_size" if pool.initial_size is None else "initial_size",
        pool.accelerator_type,
        pool.label_selector or {},
        devices,
        tenths,
    )


def _workers(job: TrainDrafterJobConfig) -> Actors:
    """Return the workers of a training job. NCCL refuses two workers on one GPU."""
    workers = job.workers
    return Actors(
        "workers",
        None if workers.num_gpus == "auto" else workers.num_gpus,
        workers.count,
        workers.count,
        "count",
        devices={"target.device": job.target.device},
        shares=False,
        cpus_with_gpu=0.0,
        cpus_without=WORKER_CPUS,
    )


def tasks_of(job: AnyJob) -> Iterator[Tasks]:
    """Yield the tasks of a job that reserve CPUs."""
    if isinstance(job, CaptionJobConfig):
        labels, dotted = job.pool.decode_label_selector or {}, "pool.decode_label_selector"
        yield Tasks("reading", READ_CPUS, labels=labels, labels_where=dotted)
        yield Tasks("decoding", job.pool.decode_cpus, "pool.decode_cpus", labels, dotted)
    elif isinstance(job, SynthesizeJobConfig):
        yield Tasks("reading", READ_CPUS)
        yield Tasks("preparing", PREPARE_CPUS)
        if job.sink.images:
            yield Tasks("encoding", job.image.encode_cpus, "image.encode_cpus")
