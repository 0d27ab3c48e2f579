from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.media.pixels import MediaError
from pipeline.media.video.sampling import FrameSampling, windows

TENTHS = [number / 10 for number in range(100)]


def test_a_count_takes_both_ends_and_equal_distances() -> None:
    [clip] = windows(TENTHS, 10.0, FrameSampling(num_frames=4))
    assert clip.indices == (0, 33, 66, 99)
    assert (clip.start_s, clip.end_s, clip.rate_fps) == (0.0, 10.0, 0.4)
    assert windows(TENTHS, 10.0, FrameSampling(num_frames=1))[0].indices == (0,)


def test_a_video_with_fewer_frames_than_asked_for_shows_each_once() -> None:
    [clip] = windows([0.0, 0.5, 1.0], 1.5, FrameSampling(num_frames=8))
    assert clip.indices == (0, 1, 2)
    assert clip.rate_fps == 2.0


@pytest.mark.parametrize("count", [2, 3, 5, 8, 64, 99])
def test_counts_are_spaced_as_qwen3_vl_spaces_them(count) -> None:
    [clip] = windows(TENTHS, 10.0, FrameSampling(num_frames=count))
    assert list(clip.indices) == np.linspace(0, 99, count).round().astype(int).tolist()


def test_a_rate_takes_what_is_shown_at_each_moment() -> None:
    [clip] = windows(TENTHS, 10.0, FrameSampling(fps=2.0))
    assert clip.indices == tuple(range(0, 100, 5))
    assert clip.rate_fps == 2.0
    [clip] = windows([0.0, 0.1, 2.0, 2.9], 3.0, FrameSampling(fps=1.0))
    assert clip.indices == (0, 1, 2)


def test_a_rate_above_the_videos_own_and_one_beyond_the_limit_are_spaced_evenly() -> None:
    [clip] = windows(TENTHS, 10.0, FrameSampling(fps=30.0, max_frames=500))
    assert clip.indices == tuple(range(100))
    assert clip.rate_fps == 10.0
    [clip] = windows(TENTHS, 10.0, FrameSampling(fps=5.0, max_frames=3))
    assert clip.indices == (0, 50, 99)
    assert clip.rate_fps == pytest.approx(0.3)


def test_moments_take_the_frame_that_is_shown_then() -> None:
    [clip] = windows(TENTHS, 10.0, FrameSampling(timestamps_s=(0.0, 0.25, 9.99)))
    assert clip.indices == (0, 2, 99)
    with pytest.raises(MediaError, match=r"no frame is shown at 10\.1 s: the video ends at 10 s"):
        windows(TENTHS, 10.0, FrameSampling(timestamps_s=(10.1,)))


def test_windows_share_the_video_and_a_short_rest_joins_the_last() -> None:
    spans = [(clip.start_s, clip.end_s) for clip in windows(TENTHS, 10.0, FrameSampling(num_frames=2, clip_s=4.0))]
    assert spans == [(0.0, 4.0), (4.0, 8.0), (8.0, 10.0)]
    spans = [(clip.start_s, clip.end_s) for clip in windows(TENTHS, 10.0, FrameSampling(num_frames=2, clip_s=4.5))]
    assert spans == [(0.0, 4.5), (4.5, 10.0)]
    clips = windows(TENTHS, 10.0, FrameSampling(num_frames=3, clip_s=5.0))
    assert [clip.indices for clip in clips] == [(0, 24, 49), (50, 74, 99)]
    assert len(windows(TENTHS, 10.0, FrameSampling(num_frames=3, clip_s=60.0))) == 1


def test_a_window_without_a_new_frame_shows_the_current_frame() -> None:
    clips = windows([0.0, 0.5, 9.0], 10.0, FrameSampling(num_frames=4, clip_s=2.0))
    assert [clip.indices for clip in clips] == [(0, 1), (1,), (1,), (1,), (2,)]


times = st.lists(st.integers(1, 5000), min_size=0, max_size=60).map(
    lambda gaps: [0.0, *(float(sum(gaps[: i + 1])) / 1000 for i in range(len(gaps)))]
)
ways = st.one_of(
    st.builds(FrameSampling, num_frames=st.integers(1, 40), clip_s=st.one_of(st.none(), st.floats(0.1, 20.0))),
    st.builds(
        FrameSampling,
        fps=st.floats(0.05, 60.0),
        max_frames=st.integers(1, 40),
        clip_s=st.one_of(st.none(), st.floats(0.1, 20.0)),
    ),
)


@settings(deadline=None)
@given(times, st.floats(0.001, 5.0), ways)
def test_windows_cover_the_video_and_show_ascending_frames_of_it(times_s, last_s, sampling) -> None:
    end_s = times_s[-1] + last_s
    clips = windows(times_s, end_s, sampling)
    assert clips[0].start_s == 0.0
    assert clips[-1].end_s == end_s
    assert [clip.end_s for clip in clips[:-1]] == [clip.start_s for clip in clips[1:]]
    limit = sampling.num_frames or sampling.max_frames
    before = 0
    for clip in clips:
        assert 1 <= len(clip.indices) <= limit
        assert list(clip.indices) == sorted(set(clip.indices))
        assert before <= clip.indices[0]
        assert clip.indices[-1] < len(times_s)
        assert clip.rate_fps > 0
        before = clip.indices[-1]
