"""Images in the decoders' process: without credentials, bounded in time and memory, replaced when it dies."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.media import image_decoding
from pipeline.media.pixels import DRAFT_FACTOR, decode
from pipeline.media.video import clips
from pipeline.media.video.sampling import FrameSampling
from pipeline.media.video.worker import NO_VIDEOS, DecodeLimits, DecoderWorker
from pipeline.rows.schemas import RowError
from tests.pipeline.formats.shards import encode
from tests.pipeline.media.test_image_decoding import read_table, saved

pytestmark = pytest.mark.slow

Make = Callable[..., DecoderWorker]
MANY = 1 << 30


@pytest.fixture
def worker_of() -> Iterator[Make]:
    """Makes workers, whose process may run some code first, and ends them."""
    made: list[DecoderWorker] = []

    def make(limits: DecodeLimits | None = None, code: str = "", decoder: str = NO_VIDEOS) -> DecoderWorker:
        script = "from pipeline.media.video import child\n" + textwrap.dedent(code) + "\nchild.main()\n"
        command = [sys.executable, "-c", script] if code else None
        made.append(DecoderWorker(decoder, FrameSampling(num_frames=1), limits or DecodeLimits(), command))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def pixels_of(worker: DecoderWorker, data: bytes, max_bytes: int = MANY) -> np.ndarray:
    taken: list[np.ndarray] = []

    def take(num_bytes: int) -> memoryview:
        taken.append(np.empty(num_bytes, np.uint8))
        return taken[-1].data

    height, width = worker.decode_image(data, take, max_bytes, "the limit")
    return taken[0].reshape(height, width, 3)


def code_of(worker: DecoderWorker, data: bytes, max_bytes: int = MANY) -> str:
    with pytest.raises(RowError) as caught:
        pixels_of(worker, data, max_bytes)
    return caught.value.code


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(1).integers(0, 256, (height // 16, width // 16, 3)).astype(np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def test_pixels_are_those_that_decoding_here_gives(worker_of: Make) -> None:
    worker = worker_of()
    for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
        data = saved(noise(1600, 1200), kind)
        assert np.array_equal(pixels_of(worker, data), decode(data, 10**8))
    assert worker.num_started == 1


def test_an_error_of_one_image_leaves_the_process_as_it_is(worker_of: Make) -> None:
    worker = worker_of(DecodeLimits(max_pixels=1000))
    assert code_of(worker, b"junk") == "not_an_image"
    assert code_of(worker, encode(size=(100, 11))) == "image_too_large"
    assert code_of(worker, encode(size=(20, 20)), 20 * 20 * 3 - 1) == "row_too_large"
    assert pixels_of(worker, encode(size=(20, 20)), 20 * 20 * 3).shape == (20, 20, 3)
    assert worker.num_started == 1


def test_no_secret_reaches_the_process_that_decodes_images(worker_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "not-for-decoders")
    worker = worker_of()
    pixels_of(worker, encode())
    environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
    assert b"PATH=" in environment
    assert b"not-for-decoders" not in environment


def test_a_row_that_kills_the_process_is_an_error_and_its_neighbours_are_not(
    worker_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = """
        import os, signal
        decode = child.pixels.decode
        def dying(data, *limits):
            if b"kill me" in data:
                os.kill(os.getpid(), signal.SIGSEGV)
            return decode(data, *limits)
        child.pixels.decode = dying
    """
    worker = worker_of(code=kill)
    monkeypatch.setattr(image_decoding, "worker_of", lambda *_: worker)
    table = read_table([[encode("red")], [encode() + b"kill me"], [encode("blue")]])
    made = image_decoding.decode_table(
        table, image_decoding.DecodeOptions(image_decoding.PromptOptions(media_prompt()))
    )
    assert made["error_type"].to_pylist() == ["", "decoder_died", ""]
    assert "SIGSEGV" in made["error_message"][1].as_py()
    assert worker.num_started == 2


def media_prompt():
    from configs.schema import PromptConfig

    return PromptConfig(text="x")


def test_an_image_that_takes_too_long_ends_the_process(worker_of: Make) -> None:
    hang = "import signal\nchild.pixels.decode = lambda *args: signal.pause()"
    worker = worker_of(DecodeLimits(timeout_s=0.2), code=hang)
    assert code_of(worker, encode()) == "decode_timeout"
    assert worker.pid is None


def test_a_process_that_does_not_read_does_not_block_its_supervisor(worker_of: Make) -> None:
    stuck = "import signal\nchild._exactly = lambda *args: signal.pause()"
    worker = worker_of(DecodeLimits(timeout_s=0.2), code=stuck)
    assert code_of(worker, encode() + bytes(8 << 20)) == "decode_timeout"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not count a process's memory")
def test_a_bomb_is_refused_by_memory_and_the_process_survives(worker_of: Make) -> None:
    worker = worker_of(DecodeLimits(worker_max_bytes=64 << 20))
    assert code_of(worker, saved(Image.new("RGB", (6000, 6000)), "PNG")) == "image_too_large"
    assert pixels_of(worker, encode()).size > 0


def test_the_largest_images_of_every_mode_fit_the_default_process(worker_of: Make) -> None:
    worker = worker_of()
    for mode in ("RGB", "RGBA", "LA", "P", "L", "I;16"):
        assert pixels_of(worker, saved(Image.new(mode, (8000, 8000)), "PNG")).shape == (8000, 8000, 3), mode


def test_a_process_for_images_is_replaced_when_a_video_comes(worker_of: Make, tmp_path: Path) -> None:
    from tests.pipeline.media.video.files import encode_video

    path = tmp_path / "x.mp4"
    path.write_bytes(encode_video(8))
    worker = worker_of(decoder="auto")
    pixels_of(worker, encode())
    assert "av" not in loaded(worker)
    assert len(worker.decode(str(path))) == 1
    pixels_of(worker, encode())
    assert worker.num_started == 2


def loaded(worker: DecoderWorker) -> set[str]:
    """Names of packages with native libraries in the process."""
    maps = Path(f"/proc/{worker.pid}/maps").read_text()
    return {name for name in ("av", "decord", "PIL") if f"site-packages/{name}/" in maps}


def test_images_and_videos_of_a_job_share_one_process() -> None:
    clips.close_worker()
    options = image_decoding.DecodeOptions(image_decoding.PromptOptions(media_prompt()))
    image_decoding.decode_table(read_table([[encode()]] * 3), options)
    [worker] = clips._running.values()
    assert worker.num_started == 1
    clips.close_worker()
    assert clips._running == {}


def test_a_jpeg_decoded_at_reduced_size_is_close_to_the_shrunk_full_image() -> None:
    data = saved(noise(3200, 2400), "JPEG", quality=90)
    whole = Image.fromarray(decode(data, 10**8))
    for side in (336, 400, 700):
        size = (side, side * 3 // 4)
        wanted = np.asarray(whole.resize(size, Image.Resampling.LANCZOS)).astype(int)
        pixels = decode(data, 10**8, side).astype(int)
        assert pixels.shape == wanted.shape
        assert np.abs(pixels - wanted).mean() < 1.0
        assert np.abs(pixels - wanted).max() <= 8
    assert DRAFT_FACTOR >= 2


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_drafted_jpeg_is_put_upright_in_the_right_size(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = saved(noise(1600, 800), "JPEG", exif=exif)
    assert decode(data, 10**8, 100).shape == ((50, 100, 3) if turn < 5 else (100, 50, 3))
