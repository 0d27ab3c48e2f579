"""One engine in a process of its own: told line by line what to run, and stopped while another one runs.

Both ends of the pipe: `Peer` is the parent's, `serve` the engine's. Standard library only, because interpreters of
other environments import it too. Knows nothing of any engine or of what its figures mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 900.0
RUN_LIMIT_S = 1800.0
PR_SET_PDEATHSIG = 1
LOG_LINES = 15
"""Of a peer's log that are shown when it fails."""


class PeerError(RuntimeError):
    """A peer that cannot be started or that failed; the message ends with its last words."""


@dataclass(frozen=True)
class Work:
    """What every peer of one run is given: the same folders, prompts and limits.

    `prompt_texts` and `prompt_ids` are the same prompts, as text without and as ids with what the tokenizer adds.
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
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str | Path) -> Work:
        """What `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))


@dataclass(frozen=True)
class Outcome:
    """One pass over the first prompts: wall time, new tokens of each (an end token included), and acceptance.

    `num_steps` verify steps accepted `num_accepted` drafts; both are 0 where nothing was drafted.
    """

    seconds: float
    outputs: list[list[int]]
    num_steps: int = 0
    num_accepted: int = 0


class Runner(Protocol):
    """What an engine's side has to do; `batch` samples at once, over the first `num_requests` prompts."""

    def versions(self) -> dict[str, str]: ...

    def warm(self, batch: int, num_requests: int) -> Outcome: ...

    def run(self, batch: int, num_requests: int) -> Outcome: ...


class Peer:
    """A started process; use it as a context manager, so that it ends."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                cwd=ROOT,
                env=dict(environment),
                # A group of its own, which can be stopped as a whole.
                start_new_session=True,
            )
        self._rest = b""

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the engine is loaded.

        Raises:
            PeerError: it is not within `limit_s`.
        """
        self.versions = self._receive(limit_s)["versions"]

    def ask(self, verb: str, batch: int, num_requests: int, limit_s: float = RUN_LIMIT_S) -> Outcome:
        """`warm` or `run` a pass; see `Runner`.

        Raises:
            PeerError: the engine failed, or took longer than `limit_s`.
        """
        order = json.dumps({"verb": verb, "batch": batch, "num_requests": num_requests}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("it has ended") from None
        return Outcome(**self._receive(limit_s)["outcome"])

    def pause(self) -> None:
        """Stop all its processes, spinning threads included."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def forget_peak(self) -> None:
        """Let `peak_bytes` begin anew."""
        for pid in group_members(self._process.pid):
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The highest resident memory of each of its processes, summed."""
        return sum(peak_bytes_of(pid) for pid in group_members(self._process.pid))

    def close(self) -> None:
        """End it, with all that it started; once is enough."""
        if self._process.returncode is not None:
            # Its number may be another process's by now.
            return
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _receive(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise self._failure(f"no answer within {limit_s:.0f} s")
            chunk = os.read(pipe, 1 << 20)
            if not chunk:
                raise self._failure("it has ended")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer

    def _failure(self, reason: str) -> PeerError:
        tail = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return PeerError("\n    ".join([f"{self.name}: {reason}; its log {self._log} ends with", *tail]))


def group_members(leader: int) -> list[int]:
    """Process ids whose group is that of `leader`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything, so what follows the last one is split.
            if int(stat.read_text().rpartition(")")[2].split()[2]) == leader:
                found.append(int(stat.parent.name))
    return found


def peak_bytes_of(pid: int) -> int:
    """The highest resident memory of one process so far; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def serve(load: Callable[[Work, str], Runner]) -> int:
    """The engine's side of `Peer`: load what the command line names (a work file, a mode), then run what is asked for.

    Whatever libraries print goes to the log, not into the pipe.
    """
    if sys.platform == "linux":
        # A peer that is stopped would outlive a parent that is killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**told: Any) -> None:
        channel.write(json.dumps(told) + "\n")
        channel.flush()

    try:
        runner = load(Work.read(sys.argv[1]), sys.argv[2])
        answer(versions=runner.versions())
        for line in sys.stdin:
            order = json.loads(line)
            outcome = getattr(runner, order["verb"])(order["batch"], order["num_requests"])
            answer(outcome=asdict(outcome))
    except Exception as error:  # whatever it is, the parent has to hear of it
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
        return 1
    return 0
