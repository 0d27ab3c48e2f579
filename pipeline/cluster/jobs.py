"""Submits, follows, queries and stops jobs of a cluster through Ray's Jobs API. Ray rejects a submission id that exists
already, so of two simultaneous submissions only one succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from pipeline.cluster.ray_session import environment

CONNECT_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 90.0
POLL_INTERVAL_S = 0.5
MAX_LOST_CONNECTIONS = 20
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_TALKATIVE = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
TOKEN_ADVICE = (
    "Give it the token that the cluster was started with, `ray get-auth-token` on its head prints it: "
    "RAY_AUTH_MODE=token, and either RAY_AUTH_TOKEN_PATH=FILE or ~/.ray/auth_token"
)


@dataclass(frozen=True)
class ClusterJob:
    """The cluster's record of one submission."""

    submission_id: str
    status: str
    message: str = ""
    entrypoint: str = ""
    began_ms: int | None = None
    ended_ms: int | None = None
    exit_status: int | None = None

    @property
    def number(self) -> int:
        return int(self.submission_id.rpartition("-")[2])

    @property
    def has_ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")

    def lines(self) -> list[str]:
        """Return the record as lines of text."""
        text = {"submission": self.submission_id, "status": self.status, "command": self.entrypoint}
        if self.began_ms is not None:
            end_ms = time.time() * 1000 if self.ended_ms is None else self.ended_ms
            text["ran for"] = f"{max(0.0, end_ms - self.began_ms) / 1000:,.0f} s"
        if self.exit_status is not None:
            text["exit"] = str(self.exit_status)
        if self.message and self.status != "SUCCEEDED":
            text["message"] = self.message.strip()
        return [f"{label:<12}{value}" for label, value in text.items()]


class Cluster:
    """Client of a running cluster, connected through the address of its dashboard."""

    def __init__(self, address: str) -> None:
        self.address = dashboard_url(address)
        self._client = _connect(self.address)

    def submissions(self, stem: str) -> list[ClusterJob]:
        """Return all submissions of the job with this stem, sorted by number."""
        pattern = re.escape(stem) + r"-\d+"
        jobs = [_known(job) for job in self._client.list_jobs() if re.fullmatch(pattern, job.submission_id or "")]
        return sorted(jobs, key=lambda known: known.number)

    def ask(self, submission_id: str) -> ClusterJob:
        """Return the record of a submission; raise ConfigError if the cluster has none with this id."""
        try:
            return _known(self._client.get_job_info(submission_id))
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                raise ConfigError(f"{self.address} knows no submission {submission_id!r}") from None
            raise

    def submit(self, submission_id: str, entrypoint: str, runtime_env: dict[str, Any], **resources: Any) -> None:
        """Upload the working directory and start the job; raise ConfigError if the submission id exists already."""
        try:
            self._client.submit_job(
                entrypoint=entrypoint, submission_id=submission_id, runtime_env=runtime_env, **resources
            )
        except RuntimeError as error:
            if "already exists" in str(error):
                raise ConfigError(
                    f"{self.address} already has a submission {submission_id}: another submission of the same "
                    "job was made just now; look at it with --status"
                ) from None
            raise

    def follow(self, submission_id: str, show: Callable[[str], None]) -> ClusterJob:
        """Pass the output of the job's driver to `show` until the job ends, and return its record; ConnectionError if
        the connection was lost more than `MAX_LOST_CONNECTIONS` times in a row."""
        num_shown = num_lost = 0
        while True:
            try:
                for text in self._read_on(submission_id, num_shown):
                    num_shown += len(text)
                    num_lost = 0
                    show(text)
                known = self.ask(submission_id)
                if known.has_ended:
                    return known
            except (RuntimeError, OSError) as error:  # connection errors of aiohttp and requests are OSErrors
                num_lost += 1
                if num_lost > MAX_LOST_CONNECTIONS:
                    raise ConnectionError(f"{self.address} does not answer any more: {error}") from None
            time.sleep(POLL_INTERVAL_S)

    def _read_on(self, submission_id: str, num_skipped: int) -> Iterator[str]:
        """Yield the job's log after its first `num_skipped` characters."""
        tail = self._client.tail_job_logs(submission_id)
        with asyncio.Runner() as runner:
            while True:
                try:
                    text = runner.run(anext(tail))
                except StopAsyncIteration:
                    return
                behind, num_skipped = text[num_skipped:], max(0, num_skipped - len(text))
                if behind:
                    yield behind

    def wait(self, submission_ids: Sequence[str], show: Callable[[ClusterJob], None]) -> list[ClusterJob]:
        """Wait until all of these jobs have ended, and return their records; `show` gets each record whose status has
        changed."""
        known = [self.ask(submission_id) for submission_id in submission_ids]
        for job in known:
            show(job)
        while not all(job.has_ended for job in known):
            time.sleep(POLL_INTERVAL_S)
            for number, before in enumerate(known):
                if not before.has_ended and (now := self.ask(before.submission_id)).status != before.status:
                    known[number] = now
                    show(now)
        return known

    def stop(self, submission_id: str) -> ClusterJob:
        """Stop the job's driver, wait for its end for at most `STOP_TIMEOUT_S`, and return the record."""
        if not self.ask(submission_id).has_ended:
            self._client.stop_job(submission_id)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while not (known := self.ask(submission_id)).has_ended and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)
        return known


def dashboard_url(address: str) -> str:
    """Return the URL of a dashboard from its address; raise ConfigError if it is invalid or holds credentials."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urllib.parse.urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"--address: {address} is not the address of a dashboard, such as http://HEAD:8265")
    if parts.username or parts.password or parts.query:
        raise ConfigError("--address must not hold credentials; " + TOKEN_ADVICE)
    return url.rstrip("/")


def _connect(address: str) -> Any:
    """Connect Ray's client; ConfigError if that fails. `ray start` enables a token if it finds one, and Ray's client
    sends it only if RAY_AUTH_MODE is set, so for this machine the token is read here."""
    from ray.exceptions import AuthenticationError

    parts = urllib.parse.urlsplit(address)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"--address: no server answers at {address}: {error.strerror or error}") from None
    try:
        return _client(address, {})
    except AuthenticationError as error:
        token = _token() if host in _LOOPBACK and "RAY_AUTH_MODE" not in os.environ else ""
        if token:
            with contextlib.suppress(AuthenticationError):
                return _client(address, {"Authorization": f"Bearer {token}"})
        raise ConfigError(f"--address: {address} refuses this client ({_first_line(error)}). {TOKEN_ADVICE}") from None
    except (RuntimeError, OSError, ValueError) as error:
        raise ConfigError(f"--address: {address} is no dashboard that takes jobs: {_first_line(error)}") from None


def _client(address: str, headers: dict[str, str]) -> Any:
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    with environment(dict.fromkeys(ADDRESS_VARIABLES)):  # Ray prefers these variables to its arguments
        return JobSubmissionClient(address, headers=headers)


def _token() -> str:
    """Read this machine's token from Ray's environment variables or token file; empty if there is none."""
    given = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if given:
        return given
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _known(job: Any) -> ClusterJob:
    return ClusterJob(
        submission_id=job.submission_id or "",
        status=str(getattr(job.status, "value", job.status)),
        message=job.message or "",
        entrypoint=job.entrypoint or "",
        began_ms=job.start_time,
        ended_ms=job.end_time,
        exit_status=getattr(job, "driver_exit_code", None),
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
