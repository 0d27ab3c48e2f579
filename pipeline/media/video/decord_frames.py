"""Reads frames with decord, of the videos for which it returns the frames that PyAV returns.

decord 0.6 numbers frames by the packets of the file and seeks to key frames. So it returns wrong frames, without an
error, if the first packets cannot be decoded or frames after a key frame reference frames before it. It ignores flips,
pixels that are not square, and high dynamic range. Such videos are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.media.pixels import MediaError
from pipeline.media.video.colour import HD_HEIGHT, HLG, PQ, UNSPECIFIED
from pipeline.media.video.container import VideoStream, has_index, open_container

IDR = 5
"""The NAL unit type of an IDR picture of H.264."""
CODECS = ("h264", "hevc", "vp8", "vp9", "mpeg4")


def refuse_other_frames(video: VideoStream, first: Any, is_displayed_as_stored: bool) -> None:
    """Raise MediaError `unsupported_video` for a video of which decord would return other frames than PyAV; `first` is
    its first frame."""
    formats = video.format.split(",")
    reason = ""
    if not has_index(video.format) or video.codec not in CODECS:
        reason = f"does not find frames reliably in {video.codec} in {formats[0]}"
    elif not (video.restarts_cleanly and _keys_are_idr(video)):
        reason = "gives wrong frames for this video, whose frames depend on frames before their key frame"
    elif not is_displayed_as_stored or video.aspect != 1:
        reason = "does not turn, flip or stretch this video"
    elif first.color_trc in (PQ, HLG) or (first.colorspace == UNSPECIFIED and first.height >= HD_HEIGHT):
        reason = "does not read the colours of this video"
    if reason:
        raise MediaError("unsupported_video", f"decord {reason}; source.video.decoder: auto takes PyAV for it")


def _keys_are_idr(video: VideoStream) -> bool:
    """Return whether every key frame of an H.264 video is an IDR picture, which no later frame looks back across."""
    if video.codec != "h264":
        return True
    with open_container(video.path) as container:
        stream = container.streams[video.stream]
        extradata = bytes(stream.codec_context.extradata or b"")
        keys = (packet for packet in container.demux(stream) if packet.size and packet.is_keyframe)
        return all(IDR in nal_kinds(bytes(packet), extradata) for packet in keys)


def nal_kinds(data: bytes, extradata: bytes) -> set[int]:
    """Return the NAL unit types in one H.264 packet with length prefixes (avcC) or start codes."""
    kinds: set[int] = set()
    if len(extradata) > 4 and extradata[0] == 1:
        width = (extradata[4] & 3) + 1
        offset = 0
        while offset + width < len(data):
            kinds.add(data[offset + width] & 31)
            offset += width + int.from_bytes(data[offset : offset + width], "big")
        return kinds
    offset = data.find(b"\0\0\1")
    while offset >= 0 and offset + 3 < len(data):
        kinds.add(data[offset + 3] & 31)
        offset = data.find(b"\0\0\1", offset + 3)
    return kinds


def decord_frames(video: VideoStream, indices: Sequence[int], width: int, height: int) -> Iterator[NDArray[np.uint8]]:
    """Yield frames as uint8 RGB (height, width, 3). MediaError `broken_video` if decord fails, or counts other frames
    than the container."""
    import decord

    try:
        reader = decord.VideoReader(video.path, ctx=decord.cpu(0), width=width, height=height, num_threads=1)
        if len(reader) != len(video.ticks):
            message = f"decord counts {len(reader)} frames where the file has {len(video.ticks)}"
            raise MediaError("broken_video", message)
        for index in indices:
            # decord pads the rows of some narrow frames and returns them with 4 channels, for example at 48 pixels.
            rows = reader[index].asnumpy().reshape(height, -1)
            yield rows[:, : width * 3].reshape(height, width, 3)
    except decord.DECORDError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise MediaError("broken_video", f"the video cannot be decoded: {lines[0][:200]}") from None
