"""Trains on several workers under Ray Train, which each process a part of every batch (`pipeline.training.run`)."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from configs.load import ConfigError
from configs.pool import JobSectionConfig
from configs.training import TrainDrafterJobConfig
from pipeline.cluster import ray_session
from pipeline.resources.machine import local_cpus
from pipeline.resources.requests import WORKER_CPUS
from pipeline.storage.output_dir import OutputDir
from pipeline.training.run import LOG, NoUsableRows, TrainingRun, Worker

ENDINGS: dict[type[Exception], str] = {ConfigError: "_job/refusal.txt", NoUsableRows: "_job/no_usable_rows.txt"}
"""Errors that all workers raise, also after a restart, and the files in which they pass them to the driver."""
FOLLOW_INTERVAL_S = 0.5


def ray_job(job: TrainDrafterJobConfig) -> JobSectionConfig:
    """Return the settings of the Ray of several workers."""
    workers = job.workers
    return JobSectionConfig(
        ray_address=workers.ray_address, num_cpus=max(local_cpus(JobSectionConfig()), workers.count + 1)
    )


def on_device(job: TrainDrafterJobConfig) -> TrainDrafterJobConfig:
    """Return the job with its target on the CPU if `workers.num_gpus` is 0: a single worker runs outside of Ray, which
    would hide the GPUs."""
    if job.workers.num_gpus != 0 or job.target.device != "auto":
        return job
    return job.model_copy(update={"target": job.target.model_copy(update={"device": "cpu"})})


def train_on_workers(job: TrainDrafterJobConfig, output: OutputDir) -> None:
    """Train on `workers.count` workers, with gloo on CPUs and torch's default backend on GPUs. After a worker dies,
    training restarts from the last checkpoint, up to `workers.max_failures` times."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    workers = job.workers
    endings = {kind: Path(output.path(name)) for kind, name in ENDINGS.items()}
    for file in endings.values():
        file.unlink(missing_ok=True)
    # Workers must resolve relative paths as the driver does: by default Ray Train changes their working directory.
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    with (
        tempfile.TemporaryDirectory(prefix="draftfleet-train-", ignore_cleanup_errors=True) as scratch,
        ray_session.session(ray_job(job), log_to_driver=False, dotted="workers.ray_address"),
        _log_shown(Path(output.path(LOG))),
    ):
        TorchTrainer(
            work,
            train_loop_config={"job": job.model_dump_json(), "output": output.url},
            scaling_config=ScalingConfig(
                num_workers=workers.count,
                use_gpu=workers.gpus > 0,
                resources_per_worker={"GPU": workers.gpus} if workers.gpus else {"CPU": WORKER_CPUS},
            ),
            torch_config=TorchConfig(backend=None if workers.gpus else "gloo"),
            run_config=RunConfig(
                name="train_drafter",
                storage_path=scratch,
                failure_config=FailureConfig(max_failures=workers.max_failures),
            ),
        ).fit()
    for kind, file in endings.items():
        if file.exists():
            raise kind(file.read_text(encoding="utf-8"))


def work(config: dict[str, Any]) -> None:
    """Train in one worker: the training loop of Ray Train."""
    from ray import train

    context = train.get_context()
    worker = Worker(context.get_world_rank(), context.get_world_size(), add_up)
    job, output = TrainDrafterJobConfig.model_validate_json(config["job"]), OutputDir(config["output"])
    try:
        run = TrainingRun(job, output, worker)
        run.train()
        if run.is_first:
            run.finish()
    except tuple(ENDINGS) as error:  # must not count as a failure, after which Ray Train starts the workers again
        name = next(name for kind, name in ENDINGS.items() if isinstance(error, kind))
        output.write_bytes(name, str(error).encode())


def add_up(values: torch.Tensor) -> None:
    torch.distributed.all_reduce(values)


def _log_shown(path: Path) -> AbstractContextManager[None]:
    """Copy lines that are added to the log to standard error while the block runs."""
    position = path.stat().st_size if path.exists() else 0

    def look() -> None:
        nonlocal position
        if path.exists():
            with path.open("rb") as log:
                log.seek(position)
                added = log.read()
            position += len(added)
            sys.stderr.write(added.decode("utf-8", "replace"))
            sys.stderr.flush()

    return ray_session.poll(look, FOLLOW_INTERVAL_S, "log", last_look=True)
