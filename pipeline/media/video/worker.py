"""Supervises the decoding process, so that a crash, a hang or a decompression bomb affects only one image or video. It
is replaced after a limited number of files or if its memory has grown, because native decoders leak."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from files.installation import IMPORT_ROOT
from pipeline.media.video import messages
from pipeline.media.video.sampling import FrameSampling
from pipeline.rows.schemas import RowError

MODULE = f"{__package__}.child"
START_TIMEOUT_S = 60.0
GRACE_S = 0.5
NO_VIDEOS = "none"
"""Decoder name of a process that decodes images only and loads no video library."""
WORKER_MAX_IMAGES = 20_000
"""Number of images after which the process is replaced."""
PIPE_BYTES = 1 << 20
"""Requested buffer size of each pipe in bytes; a large buffer reduces context switches."""
_SET_PIPE_BYTES = 1031  # F_SETPIPE_SZ of Linux
KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables passed to the child process; it gets no others, so that it has no credentials."""


class WorkerError(RuntimeError):
    """The decoding process cannot be started; the error is not caused by an image or video."""


@dataclass(frozen=True)
class DecodeLimits:
    """Limits of one file and of one process, and colours and shape of pixels; see `source` and `source.video`."""

    max_pixels: int = 64_000_000
    max_side_px: int | None = None
    convert_to_srgb: bool = True
    square_pixels: bool = True
    keeps_damaged: bool = False
    max_decoded_bytes: int = 1 << 30
    timeout_s: float = 60.0
    worker_max_videos: int = 200
    worker_max_bytes: int = 1 << 30


@dataclass(frozen=True)
class DecodedClip:
    """One clip of a video: `rgb` is uint8 (num_frames, height, width, 3); `timestamps_s` count from `start_s`."""

    clip_index: int
    num_clips: int
    start_s: float
    end_s: float
    fps: float
    timestamps_s: list[float]
    num_frames: int
    height: int
    width: int
    rgb: bytes | bytearray
    part: str = ""
    """Which part of the video is used, and why (`parts`); empty if it is decoded to its end."""


Take = Callable[[int], memoryview]
"""A function from a number of bytes to writable memory of that size for pixels."""


class DecoderWorker:
    """Owns at most one decoding process, started at the first file; an image-only process is replaced at the first
    video. RowError with the code of a decoding error, `decoder_died` or `decode_timeout`; WorkerError if it cannot
    start."""

    def __init__(
        self, decoder: str, sampling: FrameSampling, limits: DecodeLimits, command: Sequence[str] | None = None
    ) -> None:
        self._request = {"decoder": decoder, "sampling": asdict(sampling), "damage": "", **asdict(limits)}
        self._limits = limits
        self._command = list(command or (sys.executable, "-m", MODULE))
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self._num_videos = self._num_images = 0
        self._takes_videos = False
        self.num_started = 0
        self.resident_bytes = 0
        """Resident bytes of the process after the last file; 0 if it has exited or the system does not report them."""

    def decode(self, path: str) -> list[DecodedClip]:
        """Decode a video to its clips. With `keeps_damaged`, a damaged one is decoded again up to its damage, within
        the same time limit."""
        deadline = time.monotonic() + self._limits.timeout_s
        try:
            return self._decode(path, deadline)
        except RowError as error:
            if error.code != "broken_video" or not self._limits.keeps_damaged:
                raise
            damage = error
        try:
            return self._decode(path, deadline, damage.message)
        except RowError:
            raise damage from None

    def _decode(self, path: str, deadline: float, damage: str = "") -> list[DecodedClip]:
        process = self._running(takes_videos=True)
        self._num_videos += 1
        replies = self._ask(process, "video", self._request | {"path": path, "damage": damage}, deadline)
        return [DecodedClip(rgb=rgb, **header) for header, rgb in replies]

    def decode_image(
        self, data: bytes | pa.Buffer, take: Take, max_decoded_bytes: int, row_limit: str = ""
    ) -> tuple[int, int]:
        """Decode one encoded image into the memory that `take` returns; returns height and width. `max_decoded_bytes`
        limits its pixels; `row_limit` describes that limit in the error `row_too_large`."""
        process = self._running(takes_videos=False)
        self._num_images += 1
        request = self._request | {"kind": "image", "max_decoded_bytes": max_decoded_bytes, "row_limit": row_limit}
        deadline = time.monotonic() + self._limits.timeout_s
        [(header, _)] = self._ask(process, "image", request, deadline, data, take)
        return header["height"], header["width"]

    def _ask(
        self,
        process: subprocess.Popen[bytes],
        what: str,
        request: dict[str, Any],
        deadline: float,
        data: bytes | pa.Buffer = b"",
        take: Take = lambda count: memoryview(bytearray(count)),
    ) -> list[tuple[dict[str, Any], Any]]:
        """Send one file; returns (header, payload) of each reply, with the payload in memory from `take`."""
        payload = memoryview(data)
        replies = []

        def read_payload(count: int) -> Any:
            view = take(count) if count else memoryview(b"")
            self._fill(view, deadline)
            return view.obj

        try:
            self._write(memoryview(messages.pack(request, payload.nbytes)), deadline)
            self._write(payload, deadline)
            while True:
                header, reply = messages.receive(lambda count: self._read(count, deadline), read_payload)
                kind = header.pop("kind")
                if kind in ("clip", "image"):
                    replies.append((header, reply))
                    continue
                self._recycle(process)
                if kind == "error":
                    raise RowError(header["code"], header["message"])
                return replies
        except (EOFError, BrokenPipeError):
            raise RowError("decoder_died", f"the decoder's process {self._end()} while it had this {what}") from None
        except TimeoutError:
            self._end()
            raise RowError("decode_timeout", f"decoding took more than {self._limits.timeout_s:g} s") from None

    def close(self) -> None:
        self._end()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _running(self, takes_videos: bool = True) -> subprocess.Popen[bytes]:
        fits = self._takes_videos or not takes_videos
        if fits and self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        child_reads, self._requests = os.pipe()
        self._answers, child_writes = os.pipe()
        os.set_blocking(self._requests, False)
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):  # a smaller buffer is only slower
                fcntl.fcntl(pipe, _SET_PIPE_BYTES, PIPE_BYTES)
        self._takes_videos = takes_videos
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        paths = [str(IMPORT_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment |= {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}
        decoder = self._request["decoder"] if takes_videos else NO_VIDEOS
        arguments = [child_reads, child_writes, self._limits.worker_max_bytes, decoder]
        try:
            self._process = subprocess.Popen(
                [*self._command, *map(str, arguments)],
                pass_fds=(child_reads, child_writes),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # decoders print warnings there; the row has the error
            )
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self.num_started += 1
        self._num_videos = self._num_images = 0
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            header, _ = messages.receive(lambda count: self._read(count, deadline))
        except (EOFError, TimeoutError):
            raise WorkerError(f"the decoders' process {self._end()} before it was ready") from None
        if header["kind"] != "ready":
            self._end()
            raise WorkerError(f"the decoders' process cannot start: {header['message']}")
        return self._process

    def _read(self, count: int, deadline: float) -> bytearray:
        """Read exactly `count` bytes of the answer; TimeoutError after the deadline."""
        data = bytearray(count)
        self._fill(memoryview(data), deadline)
        return data

    def _write(self, data: memoryview, deadline: float) -> None:
        """Send all bytes; TimeoutError at the deadline if the child process does not read them."""
        data = data.cast("B") if data.nbytes else data
        while data.nbytes:
            if not select.select([], [self._requests], [], _seconds_left(deadline))[1]:
                raise TimeoutError
            data = data[os.write(self._requests, data) :]

    def _fill(self, view: memoryview, deadline: float) -> None:
        """Fill the view with the next bytes of the answer."""
        filled = 0
        while filled < view.nbytes:
            if not select.select([self._answers], [], [], _seconds_left(deadline))[0]:
                raise TimeoutError
            num_bytes = os.readv(self._answers, [view[filled:]])
            if num_bytes == 0:
                raise EOFError
            filled += num_bytes

    def _recycle(self, process: subprocess.Popen[bytes]) -> None:
        """End the process after its maximum number of files, or if it uses more than half of its memory limit."""
        self.resident_bytes = resident_bytes(process.pid)
        has_had_its_share = self._num_videos >= self._limits.worker_max_videos or self._num_images >= WORKER_MAX_IMAGES
        if has_had_its_share or self.resident_bytes > self._limits.worker_max_bytes // 2:
            self._end()

    def _end(self) -> str:
        """End the process, if it is running, and return how it ended, for messages."""
        for descriptor in (self._requests, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._answers = -1
        process, self._process = self._process, None
        if process is None:
            return "was not running"
        try:
            # A process that waits for requests exits when the pipe is closed.
            process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        code = process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _seconds_left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has exited or the system does not report it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0
