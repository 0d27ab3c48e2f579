"""Frames as players show them: display matrices, shapes of pixels, and the container's default stream."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from configs.load import ConfigError
from pipeline.media.pixels import MediaError
from pipeline.media.video.decode import read_frames
from pipeline.media.video.probing import probe
from pipeline.run.resume import refuse_other_content
from pipeline.storage.output_dir import OutputDir
from tests.pipeline.attempts import job
from tests.pipeline.media.video.files import HEIGHT, MATRICES, WIDTH, displayed, encode_video, number_in, remuxed

H264 = encode_video(6, codec="libx264", first=5, gop=3, options={"preset": "ultrafast"})
MPEG4 = encode_video(6, first=5, gop=3)


def frames_of(data: bytes, folder: Path, indices: tuple[int, ...] = (0, 4), **options: Any) -> NDArray[np.uint8]:
    (folder / "video").write_bytes(data)
    return np.stack(list(read_frames(probe(str(folder / "video"), 10**6, **options), indices, None)))


def shown(pixels: NDArray[np.uint8], matrix: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """Move every pixel of one frame to where the matrix maps it."""
    a, b, c, d = matrix
    height, width = pixels.shape[:2]
    y, x = np.mgrid[:height, :width]
    new_x, new_y = a * x + c * y, b * x + d * y
    new_x, new_y = new_x - new_x.min(), new_y - new_y.min()
    moved = np.zeros((new_y.max() + 1, new_x.max() + 1, 3), np.uint8)
    moved[new_y, new_x] = pixels
    return moved


@pytest.mark.parametrize("data", [H264, MPEG4], ids=["h264", "mpeg4"])
@pytest.mark.parametrize("name", MATRICES)
def test_a_display_matrix_of_the_container_is_applied(name: str, data: bytes, tmp_path: Path) -> None:
    plain = frames_of(data, tmp_path)
    turned = frames_of(displayed(data, MATRICES[name]), tmp_path)
    assert np.array_equal(turned, np.stack([shown(frame, MATRICES[name]) for frame in plain]))


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize(
    ("option", "matrix"),
    [
        ("flip=horizontal", "flipped_horizontally"),
        ("flip=vertical", "flipped_vertically"),
        ("rotate=90", "turned_270"),  # the stream's angles are counterclockwise
        ("rotate=180", "turned_180"),
    ],
)
@pytest.mark.parametrize("indices", [(0, 4), (4, 5)], ids=["from_the_first", "from_a_later_frame"])
def test_a_display_orientation_in_the_stream_is_applied_to_every_frame(
    indices: tuple[int, ...], option: str, matrix: str, container: str, tmp_path: Path
) -> None:
    plain = frames_of(remuxed(H264, container), tmp_path, indices)
    data = remuxed(H264, container, bitstream_filter=f"h264_metadata=display_orientation=insert:{option}")
    turned = frames_of(data, tmp_path, indices)
    assert np.array_equal(turned, np.stack([shown(frame, MATRICES[matrix]) for frame in plain]))


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize(
    ("ratio", "size"),
    [
        ("2/1", (2 * WIDTH, HEIGHT)),
        ("1/2", (WIDTH, 2 * HEIGHT)),
        ("16/11", (round(WIDTH * 16 / 11), HEIGHT)),
        ("1/1", (WIDTH, HEIGHT)),
        ("20/1", (WIDTH, HEIGHT)),
    ],
)
def test_oblong_pixels_become_square(ratio: str, size: tuple[int, int], container: str, tmp_path: Path) -> None:
    data = remuxed(H264, container, bitstream_filter=f"h264_metadata=sample_aspect_ratio={ratio}")
    frames = frames_of(data, tmp_path)
    assert frames.shape == (2, size[1], size[0], 3)
    assert [number_in(frame) for frame in frames] == [5, 9]
    assert frames_of(data, tmp_path, square_pixels=False).shape == (2, HEIGHT, WIDTH, 3)


def test_oblong_pixels_are_stretched_before_the_frame_is_turned(tmp_path: Path) -> None:
    wide = remuxed(H264, "mp4", bitstream_filter="h264_metadata=sample_aspect_ratio=2/1")
    assert frames_of(displayed(wide, MATRICES["turned_90"]), tmp_path).shape == (2, 2 * WIDTH, HEIGHT, 3)


def test_the_limit_of_pixels_holds_for_frames_of_square_pixels(tmp_path: Path) -> None:
    path = tmp_path / "video"
    path.write_bytes(remuxed(H264, "mp4", bitstream_filter="h264_metadata=sample_aspect_ratio=2/1"))
    assert probe(str(path), 2 * WIDTH * HEIGHT).width == WIDTH
    assert probe(str(path), WIDTH * HEIGHT, square_pixels=False).width == WIDTH
    with pytest.raises(MediaError, match=f"frames of {2 * WIDTH} x {HEIGHT} are more") as caught:
        probe(str(path), 2 * WIDTH * HEIGHT - 1)
    assert caught.value.code == "video_too_large"


@pytest.mark.parametrize("default", [None, 0, 1, 2])
def test_the_default_stream_is_read(default: int | None, tmp_path: Path) -> None:
    numbers = (10, 20, 30)
    sources = [av.open(io.BytesIO(encode_video(2, first=number))) for number in numbers]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        streams = [output.add_stream_from_template(source.streams.video[0]) for source in sources]
        for index, stream in enumerate(streams):
            stream.disposition = av.stream.Disposition.default if index == default else av.stream.Disposition(0)
        for source, stream in zip(sources, streams, strict=True):
            for packet in [packet for packet in source.demux(source.streams.video[0]) if packet.size]:
                packet.stream = stream
                output.mux(packet)
    assert [number_in(frame) for frame in frames_of(buffer.getvalue(), tmp_path, (0, 1))] == [
        numbers[default or 0],
        numbers[default or 0] + 1,
    ]


def test_an_output_of_videos_that_was_begun_before_resumes_with_stored_sizes(tmp_path: Path) -> None:
    def content(source: dict[str, Any], **video: Any) -> dict[str, Any]:
        return job({**source, "path": "in", "video": video}, tmp_path / "out").content({"target": "t"})

    videos: dict[str, Any] = {"kind": "videos"}
    before = content(videos, square_pixels=False)
    assert "square_pixels" not in before["source"]["video"]
    for source in (videos, {"kind": "webdataset"}, {"kind": "parquet", "columns": {"video": "clip"}}):
        assert content(source)["source"]["video"]["square_pixels"] is True
    for source in ({"kind": "images"}, {"kind": "parquet", "columns": {"image": "picture"}}, {"kind": "text"}):
        assert "square_pixels" not in content(source)["source"]["video"]
    with pytest.raises(ConfigError, match=r"source\.video\.square_pixels: absent then, True now"):
        refuse_other_content(before, content(videos), OutputDir(str(tmp_path / "out")))
