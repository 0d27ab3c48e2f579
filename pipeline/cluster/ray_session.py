"""Connects a job to Ray: to a private local cluster, whose files are deleted at the end, or to a running cluster."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.pool import JobSectionConfig
from files import external_code
from files.installation import IMPORT_ROOT, IS_INSTALLED
from pipeline.cluster import code_archive, signals, worker_logs
from pipeline.resources import gcs
from pipeline.resources.machine import local_cpus

logger = logging.getLogger(__name__)

MAX_LOCAL_OBJECT_STORE_BYTES = 4 * 1024**3
MIN_LOCAL_OBJECT_STORE_BYTES = 128 * 1024**2
HIDE_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Environment variable that hides GPUs from tasks and actors that request none; Ray prints a notice unless it is set.
"""
INSIDE_SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_TOKEN = secrets.token_hex(32)  # for the life of the process, because Ray's client reads it once

# Ray's C++ core prints this once per process at ERROR level whenever an actor may restart and was passed a reference.
# Ray Data always passes one and holds it while the dataset runs, so the message is irrelevant here.
_RESTART_NOTICE = re.compile(rb"has constructor arguments in the object store and max_restarts > 0")
_OWN_PROGRESS = re.compile(r"^Progress bars (for operators )?disabled")


@contextlib.contextmanager
def session(
    job: JobSectionConfig,
    log_to_driver: bool = True,
    console: worker_logs.Console | None = None,
    dotted: str = "job.ray_address",
) -> Iterator[None]:
    """Start a private local Ray, or connect to the cluster at `job.ray_address`, while the block runs. A `console`
    receives the output of Ray and of workers; without one, it is printed if `log_to_driver` is set and the job's log is
    text. A Ray that is initialised already is used as it is. Raises ConfigError, which names `dotted`, if the cluster
    does not answer."""
    import ray

    if ray.is_initialized():
        _quiet_console()
        yield
        return
    with contextlib.ExitStack() as stack:
        if console is not None:
            stack.enter_context(worker_logs.connect_console(console))
        is_local = job.ray_address == "local"
        options = stack.enter_context(_local_options(job) if is_local else _cluster_options(job, dotted))
        with signals.keep_handlers():
            ray.init(
                logging_level=logging.WARNING,
                log_to_driver=console is not None or (log_to_driver and job.log == "text"),
                runtime_env={**options.pop("runtime_env", {}), "worker_process_setup_hook": _worker_setup(job)},
                **options,
            )
        stack.callback(ray.shutdown)
        _quiet_console()
        if console is not None:
            stack.enter_context(worker_logs.take_records(console, _keep_line))
        yield


@contextlib.contextmanager
def _local_options(job: JobSectionConfig) -> Iterator[dict[str, Any]]:
    """Yield `ray.init` options for a Ray with its own token and temporary folder, and without a dashboard."""
    # This logger warns that token authentication is enabled, which is intended.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    folder = tempfile.TemporaryDirectory(prefix="df-", dir=_short_temporary_root(), ignore_cleanup_errors=True)
    # With the token in the environment, Ray does not use `~/.ray`, so workers can keep HOME with its credentials.
    private: dict[str, str | None] = {
        "RAY_ADDRESS": None,
        "RAY_AUTH_MODE": None,  # if unset, a local Ray enables its token itself, also if Ray is imported already
        "RAY_AUTH_TOKEN": _TOKEN,
        "RAY_AUTH_TOKEN_PATH": None,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_USAGE_STATS_CONFIG_PATH": f"{folder.name}/usage.json",
        "RAY_TMPDIR": folder.name,
        HIDE_GPUS: "1",
    }
    with folder as path, environment(private):
        yield {
            "address": "local",
            "num_cpus": local_cpus(job),
            "include_dashboard": False,
            "_temp_dir": path,
            **_object_store(Path(path)),
        }


@contextlib.contextmanager
def _cluster_options(job: JobSectionConfig, dotted: str) -> Iterator[dict[str, Any]]:
    """Yield `ray.init` options for a running cluster; the checkout is uploaded unless this is a submitted job; a
    wheel is installed on the nodes."""
    gcs.check(job.ray_address, dotted)
    with tempfile.TemporaryDirectory(prefix="draftfleet-") as folder:
        shipped: dict[str, Any] = {"env_vars": {HIDE_GPUS: "1"}}
        if INSIDE_SUBMITTED_JOB not in os.environ and not IS_INSTALLED:
            archive = Path(folder, "checkout.zip")
            code_archive.pack(archive)
            shipped["working_dir"] = str(archive)
        yield {"address": job.ray_address, "runtime_env": shipped}


def _worker_setup(job: JobSectionConfig) -> Callable[[], None]:
    """Return the setup hook of worker processes, which installs the external code of this process, and starts the
    watchdog of `job.max_silence_s`. Ray keeps replacing a worker whose hook fails, so a worker that cannot import the
    code prints the reason and runs without it.

    With `draftfleet`, a worker of a checkout imports this code and no packages of the same names that are in the
    working directory, which Ray puts on the path of workers after this hook.
    """
    install_external_code = external_code.shipping()
    max_silence_s, root = job.max_silence_s, str(IMPORT_ROOT)

    def draftfleet_worker_setup() -> None:
        import sys

        sys.path.append(root)
        try:
            import draftfleet  # noqa: F401

            install_external_code()
            from actors.serving import heartbeat
        except ImportError as error:
            print(f"draftfleet: job.max_silence_s does not guard this worker: {error}", file=sys.stderr)
            return
        heartbeat.set_up_worker(max_silence_s)

    return draftfleet_worker_setup


@contextlib.contextmanager
def driver_actor(kind: type, *arguments: Any, **options: Any) -> Iterator[Any]:
    """Run an actor on the caller's node while the block runs; it reserves no CPU and outlives the other nodes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, scheduling_strategy=strategy, **options)(kind).remote(*arguments)
    try:
        yield actor
    finally:
        ray.kill(actor)


@contextlib.contextmanager
def poll(look: Callable[[], None], every_s: float, name: str, last_look: bool = False) -> Iterator[None]:
    """Call `look` every `every_s` seconds in the block, and with `last_look` at its end, until an error of Ray."""
    import ray

    stop = threading.Event()

    def run() -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # the cluster is shutting down; the job raises the cause
            while not stop.wait(every_s):
                look()
            if last_look:
                look()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables inside the block; None removes one."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _short_temporary_root() -> str | None:
    """Return `/tmp` if it is writable: paths of Ray's sockets below it must not exceed about 100 characters."""
    return "/tmp" if os.path.isdir("/tmp") and os.access("/tmp", os.W_OK) else None


def _object_store(folder: Path) -> dict[str, Any]:
    """Return the options of the object store: at most a quarter of host memory, on disk if `/dev/shm` is too small."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size_bytes = max(MIN_LOCAL_OBJECT_STORE_BYTES, min(MAX_LOCAL_OBJECT_STORE_BYTES, memory_bytes // 4))
    shared = Path("/dev/shm")
    if sys.platform == "linux" and (not shared.is_dir() or shutil.disk_usage(shared).free < 1.25 * size_bytes):
        return {"object_store_memory": size_bytes, "_plasma_directory": str(folder)}
    return {"object_store_memory": size_bytes}


def _quiet_console() -> None:
    """Reduce Ray Data's terminal output to warnings; Ray's log files contain all messages."""

    for handler in logging.getLogger("ray.data").handlers:
        if worker_logs.writes_to_terminal(handler):
            handler.setLevel(logging.WARNING)
            if _keep_line not in handler.filters:
                handler.addFilter(_keep_line)
    _spend_restart_notice()


def _keep_line(record: logging.LogRecord) -> bool:
    return not _OWN_PROGRESS.match(record.getMessage())


@functools.cache
def _spend_restart_notice() -> None:
    """Trigger Ray's once-per-process restart notice while stderr is captured, and print all other captured lines."""
    import ray

    # The actor requires a resource that no node has, so that no process is ever started for it.
    actor_class = ray.remote(max_restarts=1, num_cpus=0, resources={"draftfleet_nowhere": 1})(_Never)
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        stderr_copy = os.dup(2)
        try:
            os.dup2(caught.fileno(), 2)
            actor = actor_class.remote(ray.put(None))
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
        caught.seek(0)
        for line in caught:
            if not _RESTART_NOTICE.search(line):
                os.write(2, line)
    ray.kill(actor)


class _Never:
    def __init__(self, argument: object) -> None:
        raise AssertionError(f"an actor that no node can hold was started with {argument!r}")
