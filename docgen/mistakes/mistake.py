"""Defines a mistake in a job, and the environments in which mistakes are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

NO_CREDENTIALS, CLOSED_PORT, UNKNOWN_HOST = "no credentials", "a closed port", "an unknown host"
OTHER_REGION, NO_BUCKET, DENIED = "a bucket of another region", "no such bucket", "a user who may not write"
READ_ONLY, SMALL_MACHINE, SUBMITTED = "a folder that is not writable", "a machine with 32 MiB", "a submitted job"
CLUSTER, NO_CLUSTER = "a cluster without GPUs whose autoscaler can add some", "no cluster"
"""The environments of mistakes."""


@dataclass(frozen=True)
class Mistake:
    """A job with one mistake: `overrides` of a valid job, `files` that are written, an `environment`; and the refusal's
    beginning, or for one that names an absolute path, a part of it."""

    name: str
    message: str
    overrides: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""
    gpus: int = 0
    command: Literal["caption", "synthesize", "train-drafter"] = "caption"
    has_place: bool = True
    """Whether the refusal names the place of its value; a default has none."""
