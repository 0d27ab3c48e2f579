"""Packed tensors: unpacked, they equal the original in every bit, for any tensor and for every family's processor."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from models.inputs import packing
from models.inputs.packing import BITS, Packed, PackedInputs, PixelScale, pack
from models.inputs.processing import FrontEnd
from pipeline.media import pixels
from tests import toys
from tests.conformance.methods import VISUAL

SCALE = PixelScale(1 / 255, (0.48, 0.45, 0.4), (0.26, 0.26, 0.27), 2)
SHAPES = st.sampled_from([(), (0,), (7,), (2, 12), (3, 24), (3, 4, 5), (2, 3, 4, 4), (1, 2, 3, 2, 2), (2, 4, 4, 3)])
SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, 3.4e38)
NUM_PICTURES = 100


def equal_bits(tensor: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and all bits are equal; NaN equals NaN with the same bits, and 0.0 differs from -0.0."""
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    kind = tensor.dtype if tensor.dtype == torch.bool else BITS[tensor.dtype.itemsize]
    return torch.equal(tensor.contiguous().view(kind), other.contiguous().view(kind))


@st.composite
def float_tensors(draw: st.DrawFn) -> Tensor:
    """Any bits, values of a grid with a few exceptions, or values with many ties."""
    shape = draw(SHAPES)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    kind = draw(st.sampled_from(["bits", "grid", "ties"]))
    if kind == "bits":
        bits = draw(hnp.arrays(np.int64, shape, elements=st.integers(-(2**63), 2**63 - 1)))
        return torch.from_numpy(bits).to(BITS[dtype.itemsize]).view(dtype)
    if kind == "ties":
        few = draw(hnp.arrays(np.float64, shape, elements=st.sampled_from([*SPECIAL, 0.5, 1 / 3, 0.5 + 1e-7])))
        return torch.from_numpy(few).to(dtype)
    array = torch.from_numpy(draw(hnp.arrays(np.uint8, shape))).double()
    values = ((array / 255 - 0.45) / 0.26).to(dtype)
    for position in draw(st.lists(st.integers(0, max(0, values.numel() - 1)), max_size=3)):
        if values.numel():
            values.view(-1)[position] = draw(st.sampled_from(SPECIAL))
    return values


@given(
    float_tensors(),
    st.sampled_from([None, SCALE, PixelScale(1.0, (0.0,), (1.0,)), PixelScale(1 / 255, (0.5,) * 3, (0.5,) * 3)]),
)
def test_any_float_tensor_is_unpacked_bit_for_bit(values: Tensor, scale: PixelScale | None) -> None:
    assert equal_bits(pack(values, scale).unpack(), values)


@given(SHAPES, st.data())
def test_any_integer_tensor_is_unpacked_bit_for_bit(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2**7 - 1, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63 - 1]))
    values = torch.from_numpy(data.draw(hnp.arrays(np.int64, shape, elements=st.integers(-size - 1, size))))
    for tensor in (values, values.to(torch.int32), values > 0):
        packed = pack(tensor)
        assert equal_bits(packed.unpack(), tensor)
        assert packed.num_bytes <= tensor.nbytes


@pytest.mark.parametrize(
    ("least", "most", "dtype"),
    [
        (0, 255, "uint8"),
        (-1, 127, "int8"),
        (0, 256, "uint16"),
        (-1, 128, "int16"),
        (0, 2**16, "uint32"),
        (-1, 2**16, "int32"),
        (0, 2**32 - 1, "uint32"),
        (0, 2**32, "int64"),
        (-(2**31) - 1, 0, "int64"),
    ],
)
def test_integers_take_the_smallest_dtype_that_holds_them(least: int, most: int, dtype: str) -> None:
    assert pack(torch.tensor([least, most])).data.dtype == dtype


def grid(shape: tuple[int, ...]) -> Tensor:
    """Values of all 256 pixels in every channel, normalised in float32 as processors do."""
    numbers = torch.arange(math.prod(shape)).view(shape[0], 3, -1) % 256
    mean, std = (torch.tensor(values).float()[:, None] for values in (SCALE.mean, SCALE.std))
    return ((numbers.float() * np.float32(1 / 255) - mean) / std).view(shape)


def test_a_grid_takes_one_byte_per_value_and_a_value_beside_it_four() -> None:
    values = torch.cat([grid((1, 3, 16, 16))] * 2)
    packed = pack(values, SCALE)
    assert (packed.data.nbytes, packed.levels is not None and packed.levels.nbytes) == (2 * 768, 3 * 256 * 4)
    values[0, 1, 3, 3] = torch.nextafter(values[0, 1, 3, 3], torch.tensor(9.0))
    packed = pack(values, SCALE)
    assert (packed.levels, packed.num_bytes) == (None, 4 * 2 * 768)
    assert equal_bits(packed.unpack(), values)


def test_padding_takes_a_level_of_its_own_if_one_is_free() -> None:
    padded = torch.cat([grid((1, 3, 16, 16)), torch.zeros(1, 3, 16, 16)])
    assert pack(padded, SCALE).levels is None, "all 256 levels are pixels"
    padded[0, :, 15, 15] = padded[0, :, 0, 0]
    packed = pack(padded, SCALE)
    assert packed.levels is not None
    assert equal_bits(packed.unpack(), padded)


def test_equal_frames_of_patches_are_stored_once() -> None:
    frame = grid((5, 3 * 64)).view(5, 3, 1, 64)
    twice = frame.expand(-1, -1, 2, -1).reshape(5, 3 * 2 * 64)
    assert pack(twice, SCALE).data.nbytes == 5 * 3 * 64
    twice[4, -1] = twice[4, -2]
    assert pack(twice, SCALE).data.nbytes == 5 * 3 * 2 * 64
    assert equal_bits(pack(twice, SCALE).unpack(), twice)


def test_frames_that_differ_in_the_sign_of_zero_are_both_stored() -> None:
    frames = torch.zeros(5, 3, 2, 64)
    frames[0, 0, 1, 0] = -0.0
    values = frames.view(5, 3 * 2 * 64)
    assert equal_bits(pack(values, SCALE).unpack(), values)


def test_a_dtype_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="complex128"):
        pack(torch.zeros(2, dtype=torch.complex128))


# --- every family's processor --------------------------------------------------------------------------------------


def encoded(seed: int) -> bytes:
    """An image file: colour, grey, with alpha, a palette, or turned by EXIF; of any size and aspect ratio."""
    generator = np.random.default_rng(seed)
    width, height = (int(side) for side in generator.integers(8, 97, 2))
    if seed % 7 == 0:
        width = 8 + 4 * width
    noise = generator.integers(0, 256, (height, width, 4), dtype=np.uint8)
    smooth = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None].repeat(height, 0).repeat(4, 2)
    image = Image.fromarray(smooth if seed % 3 else noise, "RGBA").convert(("RGB", "L", "RGBA", "P", "LA")[seed % 5])
    exif = Image.Exif()
    exif[274] = 1 + seed % 8
    buffer = io.BytesIO()
    if image.mode in ("RGB", "L"):
        image.save(buffer, "JPEG", exif=exif, quality=60 + seed % 40)
    else:
        image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def decoded(seed: int) -> NDArray[np.uint8]:
    return pixels.decode(encoded(seed), 64_000_000)


def check_equal(packed: PackedInputs, expected: dict[str, Tensor]) -> None:
    inputs = packed.unpack()
    assert inputs.keys() == expected.keys()
    for name, value in expected.items():
        assert equal_bits(inputs[name], value), name


@pytest.mark.parametrize("family", VISUAL)
def test_packed_outputs_equal_the_processors(family: str) -> None:
    front_end, placeholder = toys.front_end(family), toys.FAMILIES[family].placeholder
    for seed in range(NUM_PICTURES):
        images = [decoded(seed + NUM_PICTURES * number) for number in range(1 + (seed % 4 == 0))]
        prompt = f"<s> w{4 + seed % 9} {' w7 '.join([placeholder] * len(images))} w9"
        packed = front_end.pack(prompt, images)
        check_equal(packed, front_end.encode(prompt, images))
        assert packed.num_images == len(images)
        values = packed.tensors["pixel_values"]
        assert values.levels is not None or len(images) > 1, "one image without padding is always packed"


@pytest.mark.parametrize("family", [name for name in VISUAL if toys.FAMILIES[name].video_placeholder])
def test_packed_clips_equal_the_processors(family: str) -> None:
    front_end = toys.front_end(family)
    for seed in range(20):
        prompt, videos = toys.with_video(family, "<s> w9", seed)
        packed = front_end.pack(prompt, (), videos)
        check_equal(packed, front_end.encode(prompt, (), videos))
        assert packed.num_frames == tuple(len(video.frames) for video in videos)
        assert packed.tensors["pixel_values_videos"].levels is not None


REAL: dict[str, dict[str, Any]] = {
    "CLIPImageProcessorPil": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    "SiglipImageProcessorPil": {"size": {"height": 384, "width": 384}},
    "LlavaNextImageProcessorPil": {},
    "LlavaOnevisionImageProcessorPil": {},
    "Qwen2VLImageProcessorPil": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    "Idefics3ImageProcessorPil": {},
    "PixtralImageProcessorPil": {},
    "Gemma3ImageProcessorPil": {},
}


@pytest.mark.parametrize("name", REAL)
def test_processors_with_settings_of_published_models(name: str) -> None:
    made = getattr(transformers, name)(**REAL[name])
    scale = PixelScale.of(made)
    assert scale is not None
    for seed in (0, 1, 7):
        outputs = made(images=[Image.fromarray(decoded(seed))], return_tensors="pt")
        for value in outputs.values():
            if isinstance(value, Tensor):
                packed = pack(value, scale)
                assert equal_bits(packed.unpack(), value)
                assert packed.num_bytes < value.nbytes or value.nbytes < 64


# --- content -------------------------------------------------------------------------------------------------------


def test_equal_pictures_have_equal_content_under_any_prompt() -> None:
    front_end, images = toys.front_end("llava"), [decoded(0)]
    first, other = (front_end.pack(f"<s> <image> w{word}", images) for word in (7, 8))
    assert first.content() == other.content()
    assert hash(first.content()) == hash(other.content())
    assert first.content("a") != first.content("b")
    assert first.content() != front_end.pack("<s> <image> w7", [255 - decoded(0)]).content()
    assert FrontEnd(toys.processor("llama")).pack("<s> w7", ()).content() == PackedInputs({}).content()


def test_tensors_of_equal_bytes_with_other_shapes_or_names_have_other_contents() -> None:
    data = np.arange(4, dtype=np.uint8)
    keys = [PackedInputs({"x": Packed("uint8", shape, data.reshape(shape))}).content() for shape in ((4,), (2, 2))]
    assert keys[0] != keys[1]
    assert keys[0] != PackedInputs({"y": Packed("uint8", (4,), data)}).content()


def test_levels_are_detected_also_if_the_sample_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SAMPLE_STRIDE", 10_000)
    values = grid((1, 3, 16, 16))
    assert pack(values, SCALE).levels is not None
    assert equal_bits(pack(values, SCALE).unpack(), values)
