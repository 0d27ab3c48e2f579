"""Videos of which a part is used: what is kept of damaged ones, and the text in their rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError
from configs.source import SourceConfig, VideoConfig
from pipeline.media.pixels import MediaError
from pipeline.media.video import parts
from pipeline.media.video.probing import MAX_VIDEO_S, probe
from pipeline.media.video.sampling import FrameSampling
from pipeline.media.video.worker import DecodedClip, DecodeLimits, DecoderWorker
from pipeline.reports.summary import count
from pipeline.rows.schemas import RowError
from pipeline.run.job_plan import ResumeOptions
from pipeline.run.resume import refuse_other_content
from pipeline.storage.output_dir import OutputDir
from tests.pipeline.attempts import job, rows_in, run
from tests.pipeline.media.video.files import encode_video, number_in, patched, remuxed

FAST = {"preset": "ultrafast"}
FRONT = {"movflags": "faststart"}
WHOLE = encode_video(24, codec="libx264", options=FAST, muxer=FRONT)
REORDERED = encode_video(24, num_b_frames=2, muxer=FRONT)
LATE = remuxed(WHOLE, "matroska", lambda packets: packets[7:])
KEEP = DecodeLimits(keeps_damaged=True)
ALL = FrameSampling(num_frames=200)
Keep = Callable[..., list[DecodedClip]]


def cut(data: bytes, share: float) -> bytes:
    """An MP4 file whose index is at its front, without the rest of its media."""
    media = data.index(b"mdat") + 4
    return data[: media + int(share * (len(data) - media))]


def zeroed(data: bytes, share: float) -> bytes:
    middle = len(cut(data, share))
    return data[:middle] + bytes(40) + data[middle + 40 :]


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keep]:
    """The clips of a video with the good part of damaged ones."""
    workers: dict[tuple[FrameSampling, DecodeLimits], DecoderWorker] = {}
    path = tmp_path_factory.mktemp("videos") / "video"

    def clips(data: bytes, sampling: FrameSampling = ALL, limits: DecodeLimits = KEEP) -> list[DecodedClip]:
        path.write_bytes(data)
        key = (sampling, limits)
        return workers.setdefault(key, DecoderWorker("auto", *key)).decode(str(path))

    yield clips
    for worker in workers.values():
        worker.close()


def numbers(clip: DecodedClip) -> list[int]:
    frames = np.frombuffer(clip.rgb, np.uint8).reshape(clip.num_frames, clip.height, clip.width, 3)
    return [number_in(frame) for frame in frames]


def message_of(keep: Keep, data: bytes, limits: DecodeLimits) -> str:
    with pytest.raises(RowError) as caught:
        keep(data, limits=limits)
    assert caught.value.code == "broken_video"
    return caught.value.message


@pytest.mark.parametrize("data", [WHOLE, REORDERED], ids=["in_order", "reordered"])
@pytest.mark.parametrize("damage", [cut, zeroed])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_frames_before_damage_are_kept_with_their_own_times(
    share: float, damage: Callable[[bytes, float], bytes], data: bytes, keep: Keep
) -> None:
    damaged = damage(data, share)
    error = message_of(keep, damaged, DecodeLimits())
    [clip] = keep(damaged)
    shown = numbers(clip)
    assert 4 <= len(shown) < 24
    assert shown == list(range(len(shown)))
    assert clip.timestamps_s == pytest.approx([number / 24 for number in shown])
    assert clip.end_s == pytest.approx(len(shown) / 24)
    seconds = f"{len(shown) / 24:.3f}".rstrip("0").rstrip(".")
    assert clip.part == f"damaged: the first {len(shown)} frames, {seconds} s, are used; {error}"


def test_pictures_that_reference_a_damaged_one_are_not_kept_even_if_they_are_shown_before_it(keep: Keep) -> None:
    kept: list[int] = []

    def damage(packets: list[Any]) -> list[Any]:
        order = sorted(packet.pts for packet in packets)
        index = next(i for i in range(5, 24) if packets[i + 1].pts < packets[i].pts)
        kept.extend(range(order.index(min(packet.pts for packet in packets[index:]))))
        made = av.Packet(bytes(packets[index])[:9] + bytes(packets[index].size - 9))
        made.pts, made.dts, made.time_base = packets[index].pts, packets[index].dts, packets[index].time_base
        return [*packets[:index], made, *packets[index + 1 :]]

    [clip] = keep(remuxed(encode_video(24, container="matroska", num_b_frames=2), "matroska", damage))
    assert numbers(clip) == kept
    assert f"damaged: the first {len(kept)} frames" in clip.part


def test_clips_and_moments_are_those_of_the_good_part(keep: Keep) -> None:
    damaged = cut(WHOLE, 0.6)
    [whole] = keep(damaged)
    clips = keep(damaged, FrameSampling(num_frames=2, clip_s=0.25))
    assert clips[-1].end_s == pytest.approx(whole.num_frames / 24)
    assert {clip.part for clip in clips} == {whole.part}
    assert numbers(keep(damaged, FrameSampling(timestamps_s=(0.0, 0.25)))[0]) == [0, 6]
    with pytest.raises(RowError, match="cut short"):
        keep(damaged, FrameSampling(timestamps_s=(0.0, 0.9)))


def test_a_late_start_and_damage_are_both_described(keep: Keep) -> None:
    late = remuxed(WHOLE, "mp4", lambda packets: packets[7:], muxer=FRONT)
    [clip] = keep(cut(late, 0.8))
    assert numbers(clip) == list(range(12, 12 + clip.num_frames))
    late_text, damage = clip.part.split("; ", 1)
    assert late_text == "late_start: the first 5 frames, 0.208 s, need pictures that the file lacks"
    assert damage.startswith(f"damaged: the first {clip.num_frames} frames, ")


@pytest.mark.parametrize(
    "data",
    [cut(WHOLE, 0.0), cut(WHOLE, 0.02), WHOLE[: WHOLE.index(b"moov") + 40], patched(WHOLE, b"avcC", 0, b"\xff" * 16)],
    ids=["no_media", "inside_the_first_frame", "inside_the_index", "no_settings"],
)
def test_a_file_without_a_good_part_is_the_error_that_it_was(data: bytes, keep: Keep) -> None:
    assert message_of(keep, data, KEEP) == message_of(keep, data, DecodeLimits())


def test_both_decodings_of_a_damaged_video_share_its_time(tmp_path: Path) -> None:
    (tmp_path / "video").write_bytes(cut(WHOLE, 0.5))
    hang = (
        "import signal\nfrom pipeline.media.video import child\nprobe = child.probe\n"
        "child.probe = lambda *args: signal.pause() if args[3] else probe(*args)\nchild.main()\n"
    )
    limits = DecodeLimits(keeps_damaged=True, timeout_s=1.0)
    worker = DecoderWorker("auto", ALL, limits, [sys.executable, "-c", hang])
    with pytest.raises(RowError, match="cut short"):
        worker.decode(str(tmp_path / "video"))
    assert worker.pid is None  # it was ended


def test_a_frame_whose_time_is_beyond_all_videos_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "video"

    def with_last_at(seconds: int) -> None:
        def moved(packets: list[Any]) -> list[Any]:
            packets[2].pts = packets[2].dts = round(seconds / packets[2].time_base)
            return packets

        path.write_bytes(remuxed(encode_video(3, container="matroska", fps=1), "matroska", moved))

    with_last_at(MAX_VIDEO_S)
    assert probe(str(path), 10**6).times_s == [0, 1, MAX_VIDEO_S]
    with_last_at(MAX_VIDEO_S + 1)
    with pytest.raises(MediaError, match="times over more than 10000000 s"):
        probe(str(path), 10**6)
    kept = probe(str(path), 10**6, damage="why")
    assert (kept.times_s, kept.end_s) == ([0, 1], 2)


def test_a_broadcast_with_lost_data_shows_its_traces_and_says_so(keep: Keep) -> None:
    data = encode_video(36, codec="libx264", container="mpegts", options=FAST)
    inside = [at for at in range(0, len(data), 188) if data[at + 1] & 0x5F == 0x01]  # of pictures, not their first
    lost = inside[len(inside) // 2]
    [clip] = keep(data[:lost] + data[lost + 188 :])
    assert clip.num_frames == 36
    assert clip.part == "damaged: 12 of 36 sampled frames have traces of lost data"  # a key frame and those behind it
    assert numbers(clip)[24:] == list(range(24, 36))
    [early] = keep(data[:lost] + data[lost + 188 :], FrameSampling(timestamps_s=(0.0, 0.2)))
    assert early.part == ""


# --- rows ----


def write_files(folder: Path) -> None:
    folder.mkdir()
    files = {"a_whole": WHOLE, "b_cut": cut(WHOLE, 0.6), "c_late": LATE, "d_hopeless": cut(WHOLE, 0.0)}
    for name, data in files.items():
        (folder / f"{name}.mp4").write_bytes(data)


def test_rows_say_which_part_they_show_and_the_summary_counts_them(tmp_path: Path) -> None:
    write_files(tmp_path / "in")
    source: dict[str, Any] = {"kind": "videos", "path": str(tmp_path / "in")}
    output = tmp_path / "out"
    run(job(source, output))
    rows, errors = rows_in(output / "data"), rows_in(output / "errors")
    assert {name: row["partial_video"].partition(":")[0] for name, row in rows.items()} == {
        "a_whole.mp4#0": "",
        "c_late.mp4#0": "late_start",
    }
    assert {row["partial_video"] for row in errors.values()} == {""}

    plan = run(job(source | {"video": {"on_damage": "keep"}}, output), ResumeOptions(retry_errors=True))
    rows, errors = rows_in(output / "data"), rows_in(output / "errors")
    assert rows["b_cut.mp4#0"]["partial_video"].startswith("damaged: the first 12 frames, 0.5 s, are used; the file")
    assert [*errors] == ["d_hopeless.mp4#0"]
    total = count(plan.output, plan.empty_summary())
    assert total.partial_videos == {"damaged": 1, "late_start": 1}
    assert ("partial videos", "1 damaged, 1 late_start") in total.lines()


def test_a_row_with_several_videos_names_the_partial_ones(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, data in (("a", WHOLE), ("b", LATE)):
        (tmp_path / f"in/{name}.mp4").write_bytes(data)
    (tmp_path / "in/rows.jsonl").write_text('{"v": ["a.mp4", "b.mp4"]}\n')
    source = {"kind": "jsonl", "path": str(tmp_path / "in/rows.jsonl"), "columns": {"video": "v"}}
    run(job(source, tmp_path / "out"))
    [row] = rows_in(tmp_path / "out/data").values()
    assert row["partial_video"].startswith("video 2 of 2: late_start: the first 5 frames")


# --- configuration and older outputs ----


@pytest.mark.parametrize(
    ("values", "message"),
    [({"decoder": "decord"}, "needs PyAV"), ({"report_partial": False}, "needs report_partial")],
)
def test_keeping_parts_needs_a_decoder_and_a_column_that_tell_them(values: dict[str, Any], message: str) -> None:
    VideoConfig(**values)
    with pytest.raises(ValueError, match=message):
        VideoConfig(on_damage="keep", **values)


def test_an_output_that_was_begun_before_resumes_without_the_column(tmp_path: Path) -> None:
    write_files(tmp_path / "in")
    source: dict[str, Any] = {"kind": "videos", "path": str(tmp_path / "in")}
    before = {"square_pixels": False, "report_partial": False}
    recorded = job(source | {"video": before}, tmp_path / "out").content({})
    assert not {"report_partial", "on_damage"} & recorded["source"]["video"].keys()
    with pytest.raises(ConfigError, match=r"source\.video\.report_partial: absent then, True now"):
        refuse_other_content(recorded, job(source, tmp_path / "out").content({}), OutputDir(str(tmp_path / "out")))
    run(job(source | {"video": before}, tmp_path / "out"))
    assert {"a_whole.mp4#0", "c_late.mp4#0"} == rows_in(tmp_path / "out/data").keys()
    for file in (tmp_path / "out").glob("*/*.parquet"):
        assert "partial_video" not in pq.read_schema(file).names


def test_what_happens_to_damaged_videos_may_change_between_attempts(tmp_path: Path) -> None:
    source: dict[str, Any] = {"kind": "videos", "path": "in"}
    kept = source | {"video": {"on_damage": "keep"}}
    assert job(source, tmp_path).content({}) == job(kept, tmp_path).content({})
    video = SourceConfig(**kept).comparable(False, True)["video"]
    assert video["on_damage"] == "keep"
    assert "on_damage" not in SourceConfig(**source).comparable(False, True)["video"]


def test_jobs_that_read_no_videos_have_no_such_column(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("a\nb\n")
    run(job({"kind": "text", "path": str(tmp_path / "rows.txt")}, tmp_path / "out"))
    assert "partial_video" not in next(iter(rows_in(tmp_path / "out/data").values()))


def test_descriptions_name_frames_and_seconds_and_are_bounded() -> None:
    assert parts.late_start(0, 0.0) == ""
    assert parts.traces(0, 8) == ""
    assert parts.joined(("", "a", "", "b")) == "a; b"
    assert len(parts.good_part(1, 0.5, "x" * 10_000)) < parts.MAX_REASON_CHARS + 60
