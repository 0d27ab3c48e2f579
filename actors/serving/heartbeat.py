"""Kills a worker process that is stopped or frozen, so that Ray replaces it and runs its rows again.

A thread of the worker writes heartbeats into a pipe, and a subprocess in its own session reads them. The subprocess
sends SIGKILL to the worker if no heartbeat arrives for `max_silence_s`. It counts only time in which it runs itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

OWN_PREFIX = "draftfleet: "
"""Prefix of every line that a worker writes for the job's terminal; see `pipeline.cluster.worker_logs`."""
OWN_LOGGERS = ("actors", "decoding", "models", "pipeline")
BEATS_PER_LIMIT = 20
"""Heartbeats per `max_silence_s`."""
MAX_BEAT_INTERVAL_S = 1.0

_READER = """
import os, select, signal, sys, time

pid, limit_s, tick_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
silent_s, last_s = 0.0, time.monotonic()
while os.getppid() == pid:
    ready, _, _ = select.select([0], [], [], tick_s)
    if ready and not os.read(0, 65536):
        break
    now_s = time.monotonic()
    silent_s = 0.0 if ready else silent_s + min(now_s - last_s, 2 * tick_s)
    last_s = now_s
    if silent_s >= limit_s and os.getppid() == pid:
        sys.stderr.write(
            f"draftfleet: process {pid} sent no heartbeat for {limit_s:g} s (job.max_silence_s): it is stopped or "
            "frozen, and is killed to be replaced\\n"
        )
        sys.stderr.flush()
        os.kill(pid, signal.SIGKILL)
        break
"""

_lock = threading.Lock()
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter(f"{OWN_PREFIX}%(message)s"))
_guarded: int | None = None


def set_up_worker(max_silence_s: float | None) -> None:
    """Start the heartbeat of a worker process, and prefix the messages of this project's loggers."""
    for name in OWN_LOGGERS:
        logger = logging.getLogger(name)
        if _handler not in logger.handlers:
            logger.addHandler(_handler)
            logger.propagate = False
    start(max_silence_s)


def start(max_silence_s: float | None) -> None:
    """Start the heartbeat of this process; None starts none, and further calls have no effect."""
    global _guarded
    with _lock:
        if max_silence_s is None or _guarded == os.getpid():
            return
        interval_s = min(max_silence_s / BEATS_PER_LIMIT, MAX_BEAT_INTERVAL_S)
        reader = _start_reader(max_silence_s, interval_s)
        _guarded = os.getpid()
        threading.Thread(target=_beat, args=(reader, max_silence_s, interval_s), name="heartbeat", daemon=True).start()


def _start_reader(max_silence_s: float, tick_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", _READER, str(os.getpid()), str(max_silence_s), str(tick_s)]
    # In a new session, the reader does not receive signals to the worker's process group.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _beat(reader: subprocess.Popen[bytes], max_silence_s: float, interval_s: float) -> None:
    while True:
        assert reader.stdin is not None
        try:
            os.write(reader.stdin.fileno(), b".")
        except BrokenPipeError:  # the reader was killed, for example by the kernel when memory ran out
            reader.stdin.close()
            reader.wait()
            reader = _start_reader(max_silence_s, interval_s)
        time.sleep(interval_s)
