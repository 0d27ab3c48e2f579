"""The files that `benchmarks.decode` decodes: JPEGs of photographic density, videos in which something moves.

Drawn from a seed, so that every machine decodes the same; nothing here is timed.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

FPS = 24


def photograph(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    """Smooth shapes with grain (height, width, 3): compresses about as photographs do."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (max(2, height // 60), max(2, width // 60), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return (smooth + generator.integers(-12, 13, (height, width, 1))).clip(0, 255).astype(np.uint8)


def encode_jpeg(pixels: NDArray[np.uint8]) -> bytes:
    """The picture at quality 90."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_video(path: Path, seed: int, num_frames: int, width: int, height: int, gop: int = 250) -> None:
    """H.264 in MP4, a window that wanders over a photograph, key frames at most `gop` frames apart."""
    field = photograph(seed, width + 96, height + 96)
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream("libx264", rate=FPS, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        for number in range(num_frames):
            left, top = int(48 + 47 * np.sin(number / 17)), int(48 + 47 * np.cos(number / 23))
            frame = np.ascontiguousarray(field[top : top + height, left : left + width])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
