"""Video files whose frames encode their number, and ways to damage them."""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

BITS = 8
WIDTH, HEIGHT = 16 * BITS, 48
TURNS = {
    90: (0, 1, 0, -1, 0, 0, 0, 0, 1),
    180: (-1, 0, 0, 0, -1, 0, 0, 0, 1),
    270: (0, -1, 0, 1, 0, 0, 0, 0, 1),
}
"""Degrees clockwise to the display matrix of QuickTime's track header."""


def frame_of(number: int, width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    """The number in stripes, its low bit on the left, brighter towards the bottom."""
    bits = [(number >> bit) & 1 for bit in range(BITS)]
    columns = np.repeat(bits, -(-width // BITS))[:width]
    shade = np.linspace(0, 40, height).astype(np.uint8)
    return np.repeat((columns * 200)[None, :] + shade[:, None], 3).reshape(height, width, 3).astype(np.uint8)


def number_in(frame: NDArray[np.uint8]) -> int:
    """The number that a decoded frame shows, whatever its size."""
    stripe = frame.shape[1] / BITS
    middles = [int((bit + 0.5) * stripe) for bit in range(BITS)]
    return sum(1 << bit for bit, middle in enumerate(middles) if frame[: frame.shape[0] // 2, middle].mean() > 110)


def encode_video(
    num_frames: int = 24,
    container: str = "mp4",
    codec: str = "mpeg4",
    fps: int | Fraction = 24,
    ticks: Sequence[int] | None = None,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    gop: int = 12,
    num_b_frames: int = 0,
    options: dict[str, str] | None = None,
    muxer: dict[str, str] | None = None,
    audio: bool = False,
    first: int = 0,
    pixels: str = "yuv420p",
) -> bytes:
    """A video file; frame i shows the number first + i and is shown at `ticks[i]` / fps, by default at i / fps."""
    with (
        tempfile.NamedTemporaryFile() as file,
        av.open(file.name, "w", format=container, options=muxer or {}) as output,
    ):
        stream: Any = output.add_stream(codec, rate=fps, options={**(options or {})})
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.codec_context.gop_size = gop
        stream.codec_context.max_b_frames = num_b_frames
        stream.codec_context.thread_count = 1
        sound: Any = output.add_stream("aac", rate=16000) if audio else None
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(frame_of(first + number, *size), format="rgb24")
            frame.pts = number if ticks is None else ticks[number]
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if sound is not None:
            _encode_silence(output, sound, 1)
        output.close()
        return Path(file.name).read_bytes()


def encode_sound(seconds: int = 1, container: str = "mp4") -> bytes:
    """A file with a sound track and nothing else."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        _encode_silence(output, output.add_stream("aac", rate=16000), seconds)
    return buffer.getvalue()


def _encode_silence(output: Any, stream: Any, seconds: int) -> None:
    for start in range(0, 16000 * seconds, 1024):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, start
        output.mux(stream.encode(frame))
    output.mux(stream.encode())


def rotated(data: bytes, degrees: int) -> bytes:
    """The MP4 file with a display matrix that turns its video clockwise."""
    at = data.index(b"tkhd") + 4
    position = at + 4 + (32 if data[at] == 1 else 20) + 16
    matrix = [value * (1 << (30 if number % 3 == 2 else 16)) for number, value in enumerate(TURNS[degrees])]
    return data[:position] + struct.pack(">9i", *matrix) + data[position + 36 :]


def patched(data: bytes, box: bytes, offset: int, value: bytes) -> bytes:
    """The file with bytes of its first box of this name replaced, `offset` counted from behind the name."""
    at = data.index(box) + 4 + offset
    return data[:at] + value + data[at + len(value) :]


def flipped(data: bytes, seed: int, num_bytes: int, start: int = 0, stop: int | None = None) -> bytes:
    """The file with some bytes between `start` and `stop` replaced at random."""
    generator = np.random.default_rng(seed)
    damaged = bytearray(data)
    for position in generator.integers(start, len(data) if stop is None else stop, num_bytes):
        damaged[position] = int(generator.integers(0, 256))
    return bytes(damaged)
