"""Colours of videos as on an sRGB screen: untagged HD, HDR10 and HLG."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.media.pixels import MediaError
from pipeline.media.video.colour import HLG, PQ, UNSPECIFIED
from pipeline.media.video.decode import _matrix, read_frames
from pipeline.media.video.probing import probe

PATCHES = np.array(
    [[200, 40, 40], [40, 180, 50], [50, 60, 190], [200, 200, 200], [120, 120, 120], [20, 20, 20], [220, 200, 60]], float
)
BT709_TO_BT2020 = np.array([[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]])


def picture(patches: NDArray[Any], height: int) -> NDArray[np.uint16]:
    """Columns of 32 pixels, 16 bits per channel from values up to 1."""
    row = np.repeat((patches * 65535).round().astype(np.uint16), 32, axis=0)
    return np.repeat(row[None], height, axis=0)


def hdr(nits: NDArray[Any], transfer: int) -> NDArray[Any]:
    """Code BT.2020 light of a display (cd/m2) as HDR10 or HLG; written from BT.2100, not from the code under test."""
    if transfer == PQ:
        power = (nits / 10000) ** (2610 / 16384)
        return ((3424 / 4096 + 2413 / 128 * power) / (1 + 2392 / 128 * power)) ** (2523 / 32)
    display = nits / 1000
    luma = display @ [0.2627, 0.6780, 0.0593]
    scene = display * luma[:, None] ** (1 / 1.2 - 1)
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), a * np.log(np.maximum(12 * scene - b, 1e-9)) + c)


def encoded(pixels: NDArray[np.uint16], matrix: int, tags: dict[str, int], pix_fmt: str) -> bytes:
    with tempfile.NamedTemporaryFile() as file, av.open(file.name, "w", format="matroska") as output:
        stream: Any = output.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = pixels.shape[1], pixels.shape[0], pix_fmt
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb48le").reformat(format=pix_fmt, dst_colorspace=matrix)
        for number in range(2):
            frame.pts = number
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        output.close()
        return Path(file.name).read_bytes()


def shown(data: bytes, folder: Path) -> NDArray[Any]:
    """The mean colour of each column."""
    (folder / "video").write_bytes(data)
    [frame] = read_frames(probe(str(folder / "video"), 10**7), (1,), None)
    return frame.reshape(frame.shape[0], -1, 32, 3)[:, :, 8:24].mean(axis=(0, 2))


@pytest.mark.parametrize(("height", "matrix"), [(718, 5), (720, 1), (1080, 1)])
def test_an_untagged_stream_has_the_matrix_of_its_size(height: int, matrix: int, tmp_path: Path) -> None:
    data = encoded(picture(PATCHES / 255, height), matrix, {}, "yuv444p")
    assert shown(data, tmp_path) == pytest.approx(PATCHES, abs=3)


@pytest.mark.parametrize(("height", "matrix"), [(48, 1), (720, 5)])
def test_the_tag_of_a_stream_precedes_its_size(height: int, matrix: int, tmp_path: Path) -> None:
    data = encoded(picture(PATCHES / 255, height), matrix, {"colorspace": matrix}, "yuv444p")
    assert shown(data, tmp_path) == pytest.approx(PATCHES, abs=3)


@pytest.mark.parametrize("transfer", [PQ, HLG], ids=["hdr10", "hlg"])
def test_hdr_below_graphics_white_has_the_colours_of_sdr(transfer: int, tmp_path: Path) -> None:
    codes = PATCHES / 255
    linear = np.where(codes <= 0.04045, codes / 12.92, ((codes + 0.055) / 1.055) ** 2.4)
    pixels = picture(hdr(203 * linear @ BT709_TO_BT2020.T, transfer), 48)
    data = encoded(pixels, 9, {"color_trc": transfer, "color_primaries": 9, "colorspace": 9}, "yuv444p10le")
    assert shown(data, tmp_path) == pytest.approx(PATCHES, abs=5)


@pytest.mark.parametrize("transfer", [PQ, HLG], ids=["hdr10", "hlg"])
def test_highlights_are_compressed_and_grow_with_their_light(transfer: int, tmp_path: Path) -> None:
    grey = np.array([100, 160, 203, 400, 700, 1000], float)[:, None] * np.ones(3)
    data = encoded(
        picture(hdr(grey, transfer), 48),
        9,
        {"color_trc": transfer, "color_primaries": 9, "colorspace": 9},
        "yuv444p10le",
    )
    levels = shown(data, tmp_path)
    assert np.ptp(levels, axis=1).max() <= 2  # grey stays grey
    assert (np.diff(levels[:, 0]) > 0).all()
    assert levels[2, 0] > 225
    assert levels[5, 0] >= 253


@pytest.mark.parametrize("kind", ["DOVI_METADATA", "DOVI_RPU_BUFFER"])
def test_dolby_vision_is_refused_only_without_a_base_layer(kind: str) -> None:
    side_data = [SimpleNamespace(type=SimpleNamespace(name=kind))]
    assert _matrix(SimpleNamespace(side_data=side_data, color_trc=PQ)) == (1, 0, 0, 1)
    with pytest.raises(MediaError, match="Dolby Vision without a base layer") as caught:
        _matrix(SimpleNamespace(side_data=side_data, color_trc=UNSPECIFIED))
    assert caught.value.code == "unsupported_video"
