"""Resolves `num_gpus: auto` of a job for the Ray that it runs on, and refuses what that Ray can never give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from configs.pool import JobSectionConfig
from configs.section import Section
from pipeline.resources import autoscaler, gcs
from pipeline.resources.capacity import Capacity, Node
from pipeline.resources.gpu_shares import share_gpus
from pipeline.resources.machine import local_cpus, this_machine
from pipeline.resources.refusals import needed_cpus, refuse_cpus, refuse_gpus, refuse_unknown_nodes
from pipeline.resources.requests import READ_CPUS, AnyJob, actors_of, tasks_of

SomeJob = TypeVar("SomeJob", bound=Section)


@dataclass(frozen=True)
class Resources:
    """GPUs of each actor, by the path of its pool; `auto` are the pools for which they were chosen, and `there` is the
    number of GPUs of the Ray, as text. `num_cpus` is set if a local Ray needs more logical CPUs than it has by default.
    """

    gpus: Mapping[str, float] = field(default_factory=dict)
    auto: tuple[str, ...] = ()
    there: str = ""
    num_cpus: int | None = None

    def line(self) -> str:
        """Return the resolution as one line of text; empty if all numbers are configured."""
        if not self.auto:
            return ""
        numbers = ", ".join(f"{where}.num_gpus {self.gpus[where]:g}" for where in self.auto)
        cpu = "; models run on the CPU" if not any(self.gpus.values()) else ""
        return f"{numbers} (auto): {self.there}{cpu}"

    def record(self) -> dict[str, Any]:
        """Return the numbers for the record of an attempt."""
        return {"num_gpus": dict(self.gpus), "auto": list(self.auto), "there": self.there}

    def apply(self, job: SomeJob) -> SomeJob:
        """Return the job with numbers in place of `auto`."""
        job = _replaced(job, {where: {"num_gpus": self.gpus[where]} for where in self.auto})
        return job if self.num_cpus is None else _replaced(job, {"job": {"num_cpus": self.num_cpus}})

    def as_configured(self, job: SomeJob) -> SomeJob:
        """Return a job of `apply` with `auto` where it was: another machine resolves it anew."""
        job = _replaced(job, {where: {"num_gpus": "auto"} for where in self.auto})
        return job if self.num_cpus is None else _replaced(job, {"job": {"num_cpus": None}})


CONFIGURED = Resources()
"""The resources of a job whose numbers are all configured."""


def _replaced(job: SomeJob, changes: Mapping[str, Mapping[str, Any]]) -> SomeJob:
    """Return the job with other values in its sections."""
    return job.model_copy(update={name: getattr(job, name).model_copy(update=patch) for name, patch in changes.items()})


def resolve(job: AnyJob, ray_job: JobSectionConfig | None, dotted: str = "job.ray_address") -> Resources:
    """Return the GPUs of every actor of a job on the Ray of `ray_job`, or in this process (None); starts nothing.
    `dotted` is the path of the Ray's address in the job file.

    Raises:
        ConfigError: the Ray cannot be reached, or can never give what the job requests.
    """
    pools, tasks = actors_of(job), list(tasks_of(job))
    capacity = this_machine(1) if ray_job is None else capacity_of(ray_job, dotted)
    refuse_unknown_nodes(pools, tasks, capacity)
    shares, num_cpus = share_gpus(pools, capacity), None
    if capacity.is_private and ray_job is not None and ray_job.num_cpus is None:
        needed = math.ceil(needed_cpus(pools, shares) + READ_CPUS)
        if needed > local_cpus(ray_job):  # logical CPUs, which only this job uses
            num_cpus, capacity = needed, this_machine(needed)
    refuse_gpus(pools, shares, capacity)
    if ray_job is not None:
        refuse_cpus(pools, tasks, shares, capacity, "job.num_cpus" if capacity.is_private else dotted)
    return Resources(shares, tuple(pool.where for pool in pools if pool.gpus is None), str(capacity), num_cpus)


def capacity_of(job: JobSectionConfig, dotted: str) -> Capacity:
    """Return what the Ray of a job can give: the one that this process is connected to, a local one, or a cluster."""
    import ray

    if ray.is_initialized():
        nodes = [gcs.node_of(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]
        return _cluster("this Ray", ray.get_runtime_context().gcs_address, nodes, gcs.value_of_connected)
    if job.ray_address == "local":
        return this_machine(local_cpus(job))
    with gcs.open_gcs(job.ray_address, dotted) as head:
        return _cluster(f"the cluster at {head.address}", head.address, head.nodes(), head.value)


def _cluster(where: str, address: str, nodes: list[Node], read: autoscaler.Read) -> Capacity:
    types = autoscaler.node_types(read, address, nodes)
    return Capacity(where, (*nodes, *(types or ())), is_open=types is None)
