"""Writes the output of Ray and its workers to `_job/logs/attempt-N.log`, and to the terminal one line per worker
process that died, our own loggers' messages, and the first line of each distinct warning or error of Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from actors.events import Events
from actors.serving.heartbeat import OWN_PREFIX
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir

LOGS = "_job/logs"
MAX_LOG_BYTES = 64 * 1024**2
"""Limit of one attempt's log file; later output is dropped, as the last line of the file reports."""
MAX_SHOWN_CHARS = 300
RAY_LOGGERS = ("ray", "ray.data", "ray.train")
_CUT = b"the log has reached its largest size; further lines are dropped\n"
_WORKER_DIED = re.compile(r"worker died or was killed.*?Worker PID: (\d+)", re.DOTALL)
_LOW_MEMORY = re.compile(r"running low on memory|memory usage threshold", re.IGNORECASE)
_RETRIED = re.compile(r"failed\. There are \S+ retries remaining")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NUMBERS = re.compile(r"\b[0-9a-f]{8,}\b|\d+")
# Errors of Ray's own bookkeeping tasks; no row depends on them.
_UNHANDLED = "Unhandled error"
_JSON_EVENT = '{"time": '


class Console:
    """Writes lines to the log file, and selected ones to the terminal. Thread-safe."""

    def __init__(self, path: Path, shown_path: str, events: Events) -> None:
        self._path, self._shown_path, self._events = path, shown_path, events
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._is_closed = False
        self._shapes: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was logged, in which case there is no log file."""
        return self._num_bytes == 0

    def take(self, data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        """Log one batch of worker output; replaces Ray's `print_to_stdstream`."""
        pid, lines = data.get("pid"), [_ANSI.sub("", str(line)) for line in data.get("lines", ())]
        name = data.get("actor_name") or data.get("task_name") or ""
        who = str(pid) if pid in ("raylet", "autoscaler") else f"{name} pid={pid}, ip={data.get('ip')}".strip()
        for line in lines:
            if line.startswith(_JSON_EVENT):
                continue  # an event for log collectors on the nodes; see `actors.events`
            self.log(f"({who}) {line}")
            if pid == "raylet":
                if died := _WORKER_DIED.search(line):  # the process id makes the line of each death distinct
                    text = f"worker process {died[1]} died; its work is run again"
                    self.show(text, "worker_died", process=int(died[1]))
                elif _LOW_MEMORY.search(line):
                    text = "a worker process was killed because the node is low on memory; its work is run again"
                    self.show(text, "low_memory")
                elif not _RETRIED.search(line):
                    self.show_once(line)
            elif pid == "autoscaler":
                from ray._private.worker import filter_autoscaler_events

                for event in filter_autoscaler_events([line]):
                    self.show_once(event)
            elif line.startswith(OWN_PREFIX):
                self.show(line.removeprefix(OWN_PREFIX), "worker_message", process=pid)

    def record(self, record: logging.LogRecord) -> None:
        """Write one of Ray's log records in the driver's process to the log, and show each distinct message once."""
        text = _ANSI.sub("", logging.Formatter("%(levelname)s %(name)s: %(message)s").format(record))
        self.log(text)
        message = record.getMessage()
        if not message.startswith(_UNHANDLED):
            self.show_once(message)

    def show_once(self, text: str) -> None:
        """Show the first line of a message of Ray, unless one that differs only in numbers was shown before."""
        first = next((line.strip() for line in text.splitlines() if line.strip()), "")
        shape = _NUMBERS.sub("#", first)
        with self._lock:
            if not first or shape in self._shapes:
                return
            self._shapes.add(shape)
        self.show(f"Ray: {_ANSI.sub('', first)}", "ray_message")

    def show(self, text: str, event: str, **values: Any) -> None:
        """Print one line with the path of the log to the terminal, or emit an event if the job's log is JSON."""
        text = access.cut(text, MAX_SHOWN_CHARS)
        if self._events.enabled:
            self._events.emit(event, "warning", message=text, log=self._shown_path, **values)
            return
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # clears the progress bar
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            print(f"{clear}{text} (log: {self._shown_path})", file=sys.stderr, flush=True)

    def log(self, text: str) -> None:
        """Append a line with a timestamp to the log file, up to `MAX_LOG_BYTES`."""
        line = f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {text}\n".encode(errors="replace")
        try:
            with self._lock:
                if self._is_closed:
                    return
                self._is_closed = self._num_bytes + len(line) > MAX_LOG_BYTES
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab") as file:
                    file.write(_CUT if self._is_closed else line)
                self._num_bytes += len(line)
        except OSError as error:  # must not propagate into a thread of Ray
            with self._lock:
                self._is_closed = True
            self.show(f"the log cannot be written and ends here: {error}", "log_failed")


@contextlib.contextmanager
def open_console(output: OutputDir, attempt: int, events: Events) -> Iterator[Console]:
    """Yield the console of one attempt; if the output is remote, upload its log file when the block ends."""
    relative = f"{LOGS}/attempt-{attempt:06d}.log"
    is_local = access.is_local(output.filesystem)
    folder = None if is_local else tempfile.mkdtemp(prefix="draftfleet-log-")
    path = Path(output.path(relative)) if folder is None else Path(folder, os.path.basename(relative))
    console = Console(path, output.shown(relative), events)
    try:
        yield console
    except Exception:
        if not console.is_empty:
            console.show("the job ends with an error; what Ray and the workers printed is kept", "logs_kept")
        raise
    finally:
        if folder is not None:
            if not console.is_empty:
                try:
                    output.write_bytes(relative, path.read_bytes())
                except Exception as error:  # storage drivers raise any error
                    console.show(f"the log cannot be uploaded: {access.reason_of(error)}", "log_failed")
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def connect_console(console: Console) -> Iterator[None]:
    """Send the output of Ray and workers to the console while the block runs. Enter before `ray.init`."""
    import ray._private.worker as ray_worker
    import ray.data  # noqa: F401 (configures the logger whose handlers are replaced)

    printed = ray_worker.print_to_stdstream
    ray_worker.print_to_stdstream = console.take
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = printed


@contextlib.contextmanager
def take_records(console: Console, keep: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Send Ray's log records of this process that pass `keep` to the console. Enter after `ray.init`."""
    replaced: list[tuple[logging.Logger, list[logging.Handler]]] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = console.record  # type: ignore[method-assign]
    handler.addFilter(keep)
    for name in RAY_LOGGERS:
        logger = logging.getLogger(name)
        if logger.handlers:
            replaced.append((logger, list(logger.handlers)))
            logger.handlers = [existing for existing in logger.handlers if not writes_to_terminal(existing)] + [handler]
    try:
        yield
    finally:
        for logger, handlers in replaced:
            logger.handlers = handlers


def writes_to_terminal(handler: logging.Handler) -> bool:
    """Return whether a log handler of Ray prints to the terminal and not to a log file."""
    is_stream = isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    return is_stream or type(handler).__name__ == "PlainRayHandler"
