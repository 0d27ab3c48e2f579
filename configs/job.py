"""Defines the section `job`: name, seed, Ray cluster, error limits, drift and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Section


class AcceptanceDrop(Section):
    """The drop of the acceptance length that counts as [drift](../guides/monitoring.md#drift)."""

    max_drop: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    """Largest relative drop below the acceptance length of the job's first rows, over all rows or those of one folder
    of the source."""
    min_rows: Annotated[int, Field(ge=16)] = 256
    """Rows of a window, and of the job's first rows."""


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
    drift: AcceptanceDrop | None = AcceptanceDrop()
    """When a drop of acceptance is reported; `null` is never."""
    max_silence_s: Annotated[float, Field(ge=1.0)] | None = 300.0
    """Longest time without a heartbeat of a worker process; a process that is stopped or frozen for longer is killed,
    and its rows run elsewhere. `null` is no limit."""
    log: Literal["text", "json"] = "text"
    """`json`: events on standard error, one JSON object per line, with job, attempt and sample ids; see
    [monitoring](../guides/monitoring.md#structured-logs)."""
