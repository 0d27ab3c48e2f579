"""Pack processor outputs without loss: pixel values as uint8 with a table of levels, integers in their smallest dtype.

Processors map the 256 values of a uint8 pixel to floats by channel, so a channel of their output has at most 256
levels. `pack` verifies this for every value, by its bits; a tensor that does not fit is stored unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.inputs.content import Content

NUM_LEVELS = 256
SAMPLE_STRIDE = 16
"""Every 16th value determines the levels first; the others are needed only if they have a level of their own."""
CHUNK_VALUES = 1 << 16
"""Values that are computed together, so that they stay in the processor's cache."""
INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)
"""Dtypes that replace int64, smallest first."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype with the bits of a dtype, by item size in bytes."""
TEXT_INPUTS = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))
"""Processor outputs that describe tokens; all others describe images and videos."""


@dataclass(frozen=True)
class PixelScale:
    """How a processor maps a uint8 pixel to a float: (pixel · `factor` − mean) / std, by channel.

    `frames_per_patch` is the number of frames in one flattened patch (Qwen). The scale only proposes levels: rounding
    and the processor's order of operations do not matter.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    frames_per_patch: int = 1

    @classmethod
    def of(cls, part: Any) -> Self | None:
        """Read the settings of an image or video processor; None if it has no such settings."""
        try:
            factor = float(part.rescale_factor) if part.do_rescale else 1.0
            mean, std = (
                (_channels(setting) for setting in (part.image_mean, part.image_std))
                if part.do_normalize
                else (
                    _channels(0.0),
                    _channels(1.0),
                )
            )
            frames = int(getattr(part, "temporal_patch_size", None) or 1)
        except (AttributeError, TypeError, ValueError):
            return None
        is_usable = len(mean) == len(std) and 0.0 not in (factor, *std) and frames > 0
        return cls(factor, mean, std, frames) if is_usable else None


def _channels(value: Any) -> tuple[float, ...]:
    return tuple(float(channel) for channel in value) if isinstance(value, (list, tuple)) else (float(value),) * 3


@dataclass(frozen=True, eq=False)
class Packed:
    """One packed tensor of dtype `dtype` (a name in torch) and shape `shape`.

    With `levels` (C, 256), which has the bits of float levels, `data` is uint8 (outer, C, inner): the level of each
    value. Fewer values than in `shape` mean that the frames of each patch are equal and stored once. Without `levels`,
    `data` has the values of integers, or the bits of other dtypes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]
    levels: NDArray[Any] | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.levels is None else self.levels.nbytes)

    @property
    def num_unpacked_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize

    @property
    def arrays(self) -> list[NDArray[Any]]:
        return [self.data] if self.levels is None else [self.data, self.levels]

    def unpack(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the tensor on `device`, equal to the packed one in every bit."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.levels is None:
            if dtype == torch.bool or _is_integer(dtype):
                return torch.from_numpy(self.data.astype(np.int64)).to(device, dtype)
            return torch.tensor(self.data, device=device).view(dtype)
        codes, levels = torch.tensor(self.data, device=device), torch.tensor(self.levels, device=device)
        outer, num_channels, inner = codes.shape
        num_frames = math.prod(self.shape) // codes.numel()
        values = levels.new_empty(outer, num_channels, num_frames, inner)
        for channel in range(num_channels):
            channel_values = levels[channel].index_select(0, codes[:, channel].reshape(-1).int())
            values[:, channel] = channel_values.view(outer, 1, inner)
        return values.reshape(self.shape).view(dtype)


def pack(values: Tensor, scale: PixelScale | None = None) -> Packed:
    """Pack a CPU tensor; `scale` proposes the levels of floats. ValueError for dtypes wider than 64 bits."""
    name = str(values.dtype).removeprefix("torch.")
    shape = tuple(values.shape)
    if values.dtype == torch.bool or _is_integer(values.dtype):
        return Packed(name, shape, _narrowed(values.numpy()))
    if values.dtype.itemsize not in BITS:
        raise ValueError(f"tensors of dtype {name} cannot be packed")
    if (
        scale is not None
        and values.is_floating_point()
        and (cut := _by_channel(values.contiguous(), scale)) is not None
    ):
        packed = _levels(cut, scale)
        if packed is not None:
            return Packed(name, shape, *packed)
    return Packed(name, shape, values.contiguous().view(BITS[values.dtype.itemsize]).numpy())


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of `Packed.levels` for tensors of this dtype."""
    named: torch.dtype = getattr(torch, dtype)
    return torch.empty(0, dtype=BITS[named.itemsize]).numpy().dtype


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """Return integers in the smallest dtype that holds all of them."""
    if values.dtype == np.bool_ or not values.size:
        return values.astype(np.uint8)
    least, most = int(values.min()), int(values.max())
    for dtype in INTEGERS:
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values


def _by_channel(values: Tensor, scale: PixelScale) -> Tensor | None:
    """Return a view (outer, channels, inner) of images (…, C, H, W) or flat patches (N, C · frames · pixels); None for
    other shapes. Equal frames of patches are reduced to one."""
    num_channels = len(scale.mean)
    if not values.numel():
        return None
    if values.dim() >= 3 and values.shape[-3] == num_channels:
        return values.view(-1, num_channels, values.shape[-1] * values.shape[-2])
    if values.dim() != 2 or values.shape[1] % (num_channels * scale.frames_per_patch):
        return None
    patches = values.view(len(values), num_channels, scale.frames_per_patch, -1)
    bits = patches.view(BITS[values.dtype.itemsize]).numpy()
    if all(np.array_equal(bits[:, :, 0], bits[:, :, frame]) for frame in range(1, scale.frames_per_patch)):
        return patches[:, :, 0]
    return patches.flatten(2)


def _levels(values: Tensor, scale: PixelScale) -> tuple[NDArray[np.uint8], NDArray[Any]] | None:
    """Return the level of each value (outer, C, inner) and the bits of the levels (C, 256); None if a channel has more
    levels than the scale separates."""
    bits = values.view(BITS[values.dtype.itemsize]).numpy()
    codes = np.empty(values.shape, np.uint8)
    levels = np.zeros((values.shape[1], NUM_LEVELS), bits.dtype)
    for channel in range(values.shape[1]):
        factor, offset = scale.std[channel] / scale.factor, torch.tensor(scale.mean[channel] / scale.factor + 0.5)
        for part in _parts(*values.shape[::2]):
            nearest = torch.add(offset, values[part, channel].float(), alpha=factor).nan_to_num_()
            codes[part, channel] = nearest.clamp_(0, NUM_LEVELS - 1).to(torch.uint8).numpy()
        if not _fill(levels[channel], codes[:, channel], bits[:, channel]):
            return None
    return codes, levels


def _parts(outer: int, inner: int) -> list[slice]:
    """Return slices of the first axis, each of about `CHUNK_VALUES` values or one row."""
    step = max(1, CHUNK_VALUES // inner)
    return [slice(start, start + step) for start in range(0, outer, step)]


def _fill(levels: NDArray[Any], codes: NDArray[np.uint8], bits: NDArray[Any]) -> bool:
    """Set `levels` (256,) so that `levels[codes]` equals `bits` (outer, inner); return whether that is possible.

    If the values without a level are all equal (padding), they get an unused code, which is written to `codes`.
    """
    levels[codes[:, ::SAMPLE_STRIDE]] = bits[:, ::SAMPLE_STRIDE]
    if all(np.array_equal(levels[codes[part]], bits[part]) for part in _parts(*codes.shape)):
        return True
    wrong = levels[codes] != bits
    levels[codes[wrong]] = bits[wrong]
    wrong = levels[codes] != bits
    if not wrong.any():
        return True
    padding = bits[wrong][0]
    free = np.flatnonzero(np.bincount(codes[~wrong], minlength=NUM_LEVELS) == 0)
    if len(free) and (bits[wrong] == padding).all():
        codes[wrong], levels[free[0]] = free[0], padding
        return True
    return False


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """Packed processor outputs of one prompt, by name, with batch axis 1.

    `num_frames` are the frames of each video. They replace images and videos of a request, for models with the front
    end that made them.
    """

    tensors: Mapping[str, Packed]
    num_images: int = 0
    num_frames: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_unpacked_bytes(self) -> int:
        return sum(tensor.num_unpacked_bytes for tensor in self.tensors.values())

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return self.tensors["input_ids"].shape[-1]

    @property
    def has_media(self) -> bool:
        return bool(self.num_images or self.num_frames)

    def unpack(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the processor's outputs on `device`."""
        return {name: tensor.unpack(device) for name, tensor in self.tensors.items()}

    def content(self, label: Hashable = None) -> Content:
        """Create the key of the prompt's media from their tensors."""
        media = {name: tensor for name, tensor in sorted(self.tensors.items()) if name not in TEXT_INPUTS}
        kinds = tuple((name, tensor.dtype, tensor.shape) for name, tensor in media.items())
        arrays = [array for tensor in media.values() for array in tensor.arrays]
        return Content(arrays, (label, self.num_images, self.num_frames, kinds))
