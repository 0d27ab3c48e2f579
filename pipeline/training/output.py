"""Claims the output folder of a training run: an empty folder, or one of the same run, for one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.load import ConfigError
from configs.source import JobOutputConfig, SourceConfig, with_older
from configs.training import TrainDrafterJobConfig
from pipeline.manifest.overlap import refuse_overlap
from pipeline.output.sink_folder import refuse_unusable
from pipeline.run.resume import flatten
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir
from pipeline.training.inputs import Inputs

RUN, LOCK = "_job/run.json", "_job/lock"
DONE = "training.json"


def claim_output(job: TrainDrafterJobConfig, inputs: Inputs, target_revision: str) -> OutputDir:
    """Open an empty output folder, or one in which the same run has started; raise ConfigError for any other folder. A
    new run of a `job_output` stores its answers in it."""
    with _usable(job):
        output = _open(job, inputs)
        record = {"config": job.resolved(), "target_revision": target_revision}
        if _is_begun(job, inputs, output, record):
            return output
        record["source"] = inputs.begun(output).describe()
        output.write_json(RUN, record)
    return output


def check_folder(job: TrainDrafterJobConfig, inputs: Inputs, target_revision: str) -> None:
    """Raise ConfigError if `claim_output` would refuse the output folder. Writes nothing."""
    with _usable(job):
        output = _open(job, inputs)
        _is_begun(job, inputs, output, {"config": job.resolved(), "target_revision": target_revision})
        refuse_unusable(output, "output.path")


def _open(job: TrainDrafterJobConfig, inputs: Inputs) -> OutputDir:
    if access.uri_scheme(job.output.path):
        raise ConfigError(f"output.path: {access.shown(job.output.path)} must be a folder that all workers can open")
    head = os.path.abspath(os.path.expanduser(job.output.path))
    refuse_overlap(job.source, head, "output.path")
    if isinstance(job.source, JobOutputConfig):
        refuse_overlap(inputs.source, head, "output.path")
    return OutputDir(str(Path(job.output.path).expanduser().resolve()))


def _is_begun(job: TrainDrafterJobConfig, inputs: Inputs, output: OutputDir, record: dict[str, Any]) -> bool:
    """Return whether the run of this record has started in the folder; raise ConfigError if another one has, or the
    folder holds other files."""
    folder = Path(output.path("").rstrip("/"))
    if (folder / DONE).exists():
        raise ConfigError(f"output.path: {folder} holds a finished head; choose another folder")
    if (folder / RUN).exists():
        _check_same(folder, json.loads(json.dumps({**record, "source": inputs.resumed(output).describe()})))
        return True
    if folder.exists() and any(each.name != "_job" for each in folder.iterdir()):
        raise ConfigError(f"output.path: {folder} is not empty; choose another folder")
    return False


@contextmanager
def _usable(job: TrainDrafterJobConfig) -> Iterator[None]:
    """Convert errors of the output folder to ConfigError inside the block."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have, or a torn record
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"output.path: {job.output.path} cannot be used: {reason}") from None


def _check_same(folder: Path, record: dict[str, Any]) -> None:
    """Raise ConfigError if the run in this folder was started with another record; names up to five differences."""
    recorded = json.loads((folder / RUN).read_text(encoding="utf-8"))
    begun, now = (flatten(_comparable(run)) for run in (recorded, record))
    different = (name for name in begun.keys() | now.keys() if begun.get(name) != now.get(name))
    if changed := sorted(name.removeprefix("config.") for name in different):
        raise ConfigError(
            f"output.path: {folder} holds a run that was begun otherwise: {', '.join(changed[:5])} changed; "
            "choose another folder, or put the job file back as it was"
        )


@contextmanager
def sole_run(output: OutputDir) -> Iterator[None]:
    """Lock the folder while the block runs; raise ConfigError if another process trains in it."""
    with sole(Path(output.path(LOCK)), f"output.path: another process is training in {output.shown()}"):
        yield


@contextmanager
def sole(lock: Path, refusal: str) -> Iterator[None]:
    """Lock a file while the block runs; raise ConfigError with the message `refusal` if another process holds it."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(refusal) from None
        yield


def _comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with a source that can be compared with those of versions with fewer keys."""
    config = record["config"]
    if config["source"].get("kind") == JobOutputConfig.model_fields["kind"].default:
        return record
    try:
        source = SourceConfig.model_validate_json(json.dumps(with_older(config["source"])))
    except ValidationError:  # keys or values that this version does not have
        return record
    return record | {"config": config | {"source": source.comparable(source.may_have_images, source.may_have_videos)}}
