from __future__ import annotations

import io
import json
import struct
import zlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from configs.schema import PromptConfig
from pipeline.media import image_decoding
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError
from tests.pipeline.formats.shards import encode

LIMIT = 10_000


def decode(data: bytes, max_side_px: int | None = None) -> np.ndarray:
    return image_decoding.decode_image(data, LIMIT, max_side_px)


def code_of(data: bytes) -> str:
    with pytest.raises(RowError) as caught:
        decode(data)
    return caught.value.code


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF"])
def test_lossless_formats_give_their_own_pixels(kind) -> None:
    pixels = np.zeros((5, 7, 3), np.uint8)
    pixels[1, 2] = (255, 0, 0)
    pixels[4, 6] = (0, 0, 255)
    decoded = decode(saved(Image.fromarray(pixels), kind))
    assert decoded.dtype == np.uint8
    assert np.array_equal(decoded, pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_puts_the_picture_upright(kind, orientation) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :8] = 255  # white in the upper left corner
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    stored = Image.fromarray(np.ascontiguousarray(undo(upright)))
    decoded = decode(saved(stored, kind, exif=exif, **options))
    assert decoded.shape == upright.shape
    assert np.array_equal(decoded > 127, upright > 127)


def test_a_damaged_exif_block_does_not_cost_the_picture() -> None:
    data = saved(Image.new("RGB", (8, 8), "red"), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode(data)[0, 0].tolist() == [255, 0, 0]


def test_alpha_is_composited_over_white() -> None:
    assert decode(encode((255, 0, 0, 0), mode="RGBA"))[0, 0].tolist() == [255, 255, 255]
    assert decode(encode((0, 0, 0, 128), mode="RGBA"))[0, 0].tolist() == [127, 127, 127]
    assert decode(encode((0, 255), mode="LA"))[0, 0].tolist() == [0, 0, 0]


def test_a_transparent_palette_entry_is_white_and_the_others_keep_their_colour() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    assert decode(saved(image, "PNG", transparency=0))[0].tolist() == [[255, 255, 255], [200, 100, 50]]
    assert decode(saved(image, "PNG"))[0].tolist() == [[10, 20, 30], [200, 100, 50]]


def test_sixteen_bit_grey_keeps_its_range() -> None:
    grey = Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16))
    for kind in ("PNG", "TIFF"):
        assert decode(saved(grey, kind))[0, :, 0].tolist() == [0, 1, 128, 255], kind


def test_bilevel_and_grey_become_rgb() -> None:
    assert decode(encode(1, mode="1"))[0, 0].tolist() == [255, 255, 255]
    assert decode(encode(77, mode="L"))[0, 0].tolist() == [77, 77, 77]


def test_cmyk_is_converted_and_not_inverted() -> None:
    white, cyan = encode((0, 0, 0, 0), kind="JPEG", mode="CMYK"), encode((255, 0, 0, 0), kind="TIFF", mode="CMYK")
    assert decode(white)[0, 0].tolist() == [255, 255, 255]
    assert decode(cyan)[0, 0].tolist() == [0, 255, 255]


def test_pixels_without_a_defined_range_are_refused() -> None:
    assert code_of(saved(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF")) == "unsupported_image"
    assert code_of(saved(Image.fromarray(np.ones((2, 2), np.int32)), "TIFF")) == "unsupported_image"
    assert code_of(saved(Image.new("LAB", (2, 2)), "TIFF")) == "unsupported_image"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(kind) -> None:
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=10, **options)
    assert decode(data)[0, 0].tolist() == [255, 0, 0]


def test_the_longer_side_is_shrunk_and_small_images_stay() -> None:
    assert decode(encode(size=(100, 40)), max_side_px=50).shape == (20, 50, 3)
    assert decode(encode(size=(40, 100)), max_side_px=50).shape == (50, 20, 3)
    assert decode(encode(size=(100, 1)), max_side_px=16).shape == (1, 16, 3)
    assert decode(encode(size=(50, 20)), max_side_px=50).shape == (20, 50, 3)


def test_the_pixel_limit_is_exact_and_leaves_pillows_own_untouched() -> None:
    before = Image.MAX_IMAGE_PIXELS
    assert decode(encode(size=(100, 100))).shape == (100, 100, 3)
    assert code_of(encode(size=(101, 100))) == "image_too_large"
    assert before == Image.MAX_IMAGE_PIXELS


def png_claiming(width: int, height: int) -> bytes:
    """A PNG header of this size with almost no data."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_refused_before_a_pixel_is_decoded() -> None:
    assert code_of(png_claiming(100_000, 100_000)) == "image_too_large"


JPEG = encode(kind="JPEG", size=(64, 48))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "not_an_image"),
        (b"not an image at all", "not_an_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not_an_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not_an_image"),
        (b"%PDF-1.4", "not_an_image"),
        (b"\xff\xd8\xff", "not_an_image"),
        (b"GIF89a", "not_an_image"),
        (JPEG[: len(JPEG) // 2], "broken_image"),
        (JPEG[:-40], "broken_image"),
        (png_claiming(20, 20), "broken_image"),
        (encode(size=(60, 60))[:-30], "broken_image"),
        (encode(kind="WEBP")[:30], "broken_image"),
    ],
)
def test_bytes_that_are_no_picture_have_a_code(data, code, capfd) -> None:
    assert code_of(data) == code
    assert capfd.readouterr() == ("", "")


def test_pillow_logs_nothing_about_damage(caplog) -> None:
    data = saved(Image.new("RGB", (4, 4)), "TIFF")
    at = data.index(struct.pack("<HHI", 277, 3, 1))  # SamplesPerPixel
    assert code_of(data[: at + 8] + struct.pack("<H", 40_000) + data[at + 10 :]) in ("not_an_image", "broken_image")
    assert caplog.text == ""


SEEDS = [JPEG, encode(size=(20, 20)), encode(kind="GIF"), encode(kind="TIFF"), encode(kind="WEBP"), encode(kind="BMP")]


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8),
    st.integers(0, 200),
)
def test_damaged_images_give_pixels_or_a_known_code_and_nothing_else(data, flips, cut) -> None:
    damaged = bytearray(data)
    for position, value in flips:
        damaged[position % len(damaged)] = value
    outcome = ""
    try:
        pixels = decode(bytes(damaged[: len(damaged) - cut]))
        assert pixels.ndim == 3
        assert pixels.shape[2] == 3
    except RowError as error:
        outcome = error.code
    assert outcome in ("", "not_an_image", "broken_image", "image_too_large", "unsupported_image")


# --- tables ---


def read_table(cells: list[list[bytes]], fields: list[dict] | None = None, codes: list[str] | None = None) -> pa.Table:
    count = len(cells)
    return pa.table(
        {
            "sample_id": [f"s{index}" for index in range(count)],
            "source": ["f"] * count,
            "row_index": list(range(count)),
            "videos": [[] for _ in range(count)],
            "images": [[{"bytes": data} for data in cell] for cell in cells],
            "fields": [json.dumps(values) for values in fields or [{}] * count],
            "error_type": codes or [""] * count,
            "error_message": ["earlier" if code else "" for code in codes or [""] * count],
            "url": [None if index % 2 else f"u{index}" for index in range(count)],
        },
        schema=schemas.read_schema([pa.field("url", pa.string())]),
    )


def test_rows_are_decoded_in_order_with_their_kept_columns() -> None:
    table = read_table(
        [[encode("red")], [encode("blue", (4, 2)), encode("lime")], []], [{"q": "1"}, {"q": "2"}, {"q": "3"}]
    )
    decoded = image_decoding.decode_table(table, image_decoding.DecodeOptions(PromptOptions(PromptConfig(text="Q{q}"))))
    assert decoded.schema.equals(schemas.decoded_schema([pa.field("url", pa.string())]), check_metadata=True)
    assert decoded["sample_id"].to_pylist() == ["s0", "s1", "s2"]
    assert decoded["url"].to_pylist() == ["u0", None, "u2"]
    assert decoded["error_type"].to_pylist() == ["", "", ""]
    images = [image_decoding.pixels(cell) for cell in decoded["images"].to_pylist()]
    assert [[image.shape for image in row] for row in images] == [[(6, 8, 3)], [(2, 4, 3), (6, 8, 3)], []]
    assert images[1][0][1, 3].tolist() == [0, 0, 255]
    turns = [json.loads(messages)[0]["content"] for messages in decoded["messages"].to_pylist()]
    assert [[part["type"] for part in turn] for turn in turns] == [
        ["image", "text"],
        ["image", "image", "text"],
        ["text"],
    ]
    assert [turn[-1]["text"] for turn in turns] == ["Q1", "Q2", "Q3"]


def test_a_bad_row_gets_its_code_and_its_neighbours_are_untouched() -> None:
    good = encode()
    table = read_table(
        [[good], [b"junk"], [good, JPEG[:-40]], [good], [good]],
        [{"q": "1"}, {"q": "1"}, {"q": "1"}, {"q": None}, {"q": "1"}],
        ["", "", "", "", "missing_id"],
    )
    decoded = image_decoding.decode_table(table, image_decoding.DecodeOptions(PromptOptions(PromptConfig(text="{q}"))))
    assert decoded["error_type"].to_pylist() == [
        "",
        "not_an_image",
        "broken_image",
        "missing_column_value",
        "missing_id",
    ]
    assert decoded["error_message"][2].as_py().startswith("image 2 of 2: ")
    assert decoded["error_message"][4].as_py() == "earlier"
    assert [len(cell) for cell in decoded["images"].to_pylist()] == [1, 0, 0, 0, 0]
    assert [bool(messages) for messages in decoded["messages"].to_pylist()] == [True, False, False, False, False]


def test_an_empty_table_keeps_the_schema() -> None:
    decoded = image_decoding.decode_table(
        read_table([]), image_decoding.DecodeOptions(PromptOptions(PromptConfig(text="x")))
    )
    assert decoded.num_rows == 0
    assert decoded.schema.equals(schemas.decoded_schema([pa.field("url", pa.string())]), check_metadata=True)


def test_a_slice_of_a_table_decodes_its_own_rows() -> None:
    table = read_table([[encode("red")], [encode("blue")], [encode("lime")]]).slice(1, 1)
    decoded = image_decoding.decode_table(table, image_decoding.DecodeOptions(PromptOptions(PromptConfig(text="x"))))
    assert decoded["sample_id"].to_pylist() == ["s1"]
    assert image_decoding.pixels(decoded["images"][0].as_py())[0][0, 0].tolist() == [0, 0, 255]
