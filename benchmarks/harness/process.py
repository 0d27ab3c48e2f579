"""Runs an engine ("peer") in its own process, which decodes on request and is stopped while another peer runs.

`Peer` is the parent's end of the pipe, `serve` the engine's; messages are JSON. Standard library only, because
interpreters of other environments import this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 900.0
RUN_LIMIT_S = 1800.0
PR_SET_PDEATHSIG = 1
MAX_MESSAGE_BYTES = 64 * 1024**2
LOG_LINES = 15
"""Lines of a peer's log shown in its error."""


class PeerError(RuntimeError):
    """Raised if a peer cannot be started or fails; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Work:
    """Models, prompts and limits, the same for all peers of a run.

    `prompt_ids` are the ids of `prompt_texts` with the special tokens of the tokenizer.
    """

    target: str
    drafter: str
    dtype: str
    threads: int
    gamma: int
    max_batch: int
    max_context_tokens: int
    max_new_tokens: int
    ignore_eos: bool
    prompt_texts: list[str]
    prompt_ids: list[list[int]]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str | Path) -> Work:
        return cls(**json.loads(Path(path).read_text()))


@dataclass(frozen=True)
class Outcome:
    """Wall time, new tokens of each prompt (with the end token), verify steps and accepted drafts of one pass.

    Steps and accepted drafts are 0 if nothing was drafted.
    """

    seconds: float
    outputs: list[list[int]]
    num_steps: int = 0
    num_accepted: int = 0


class Peer:
    """A started process, as a context manager."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._pipe, child = Pipe()
        with log.open("wb") as sink, child:
            self._process = subprocess.Popen(
                [*command, str(child.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=dict(environment),
                pass_fds=[child.fileno()],
                start_new_session=True,  # a process group that can be stopped as a whole
            )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the engine is loaded; raise `PeerError` after `limit_s`."""
        self.versions = self._receive(limit_s)["versions"]

    def ask(self, verb: str, batch: int, num_requests: int, limit_s: float = RUN_LIMIT_S) -> Outcome:
        """Run a pass, `verb` being `warm` or `run`; raise `PeerError` if it fails or takes longer than `limit_s`."""
        with contextlib.suppress(BrokenPipeError):  # a process that has ended is reported below
            self._pipe.send_bytes(json.dumps([verb, batch, num_requests]).encode())
        return Outcome(**self._receive(limit_s)["outcome"])

    def pause(self) -> None:
        """Stop all processes of the peer, including spinning threads."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def forget_peak(self) -> None:
        """Reset `peak_bytes`."""
        for pid in group_members(self._process.pid):
            forget_peak(pid)

    def peak_bytes(self) -> int:
        """Peak resident memory, summed over the peer's processes."""
        return sum(peak_bytes_of(pid) for pid in group_members(self._process.pid))

    def close(self) -> None:
        """End the peer's process group; does nothing if it has ended, since its id may have been reused."""
        if self._process.returncode is not None:
            return
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _receive(self, limit_s: float) -> dict[str, Any]:
        try:
            if not self._pipe.poll(limit_s):
                raise self._failure(f"no answer within {limit_s:.0f} s")
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, ConnectionResetError):
            raise self._failure("it has ended") from None
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer

    def _failure(self, reason: str) -> PeerError:
        tail = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return PeerError("\n    ".join([f"{self.name}: {reason}; its log {self._log} ends with", *tail]))


def versions_of(*modules: ModuleType) -> dict[str, str]:
    """Return the versions of Python and of imported libraries."""
    return {"python": platform.python_version(), **{module.__name__: module.__version__ for module in modules}}


def group_members(leader: int) -> list[int]:
    """Return the ids of the processes in the group of `leader`."""
    ids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may contain spaces and parentheses.
            if int(stat.read_text().rpartition(")")[2].split()[2]) == leader:
                ids.append(int(stat.parent.name))
    return ids


def peak_bytes_of(pid: int) -> int:
    """Return the peak resident memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def forget_peak(pid: int) -> None:
    """Reset the peak resident memory of a process, if the kernel allows it."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def serve(load: Callable[[Work, str], Any]) -> int:
    """Serve the requests of a `Peer`; the arguments are a work file, a mode and the file descriptor of the pipe.

    `load` returns an engine with `versions()`, and `warm(batch, num_requests)` and `run(batch, num_requests)`, which
    decode the first `num_requests` prompts, `batch` samples at a time, and return an `Outcome`.
    """
    if sys.platform == "linux":
        # A stopped peer would outlive a killed parent.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with Connection(int(sys.argv[3])) as pipe:

        def answer(**values: Any) -> None:
            pipe.send_bytes(json.dumps(values).encode())

        try:
            runner = load(Work.read(sys.argv[1]), sys.argv[2])
            answer(versions=runner.versions())
            while True:
                verb, batch, num_requests = json.loads(pipe.recv_bytes(MAX_MESSAGE_BYTES))
                answer(outcome=asdict(getattr(runner, verb)(batch, num_requests)))
        except EOFError:
            return 0
        except Exception as error:  # reported to the parent
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
            return 1
