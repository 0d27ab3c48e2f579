"""The VQ model of LlamaGen: pixels to codes and back, a convolutional network of the taming family.

Modules have the names of the public files. Codes are directions: the encoder's output and the codebook are scaled to
length 1 when they are compared; the stored codebook need not be.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from models.llamagen.shape import VqShape

NUM_USED = 65536
"""Length of the public files' record of the codes used last in training."""
_NORM_EPS = 1e-6
# Distances of this many latents to the whole codebook are held at once: 16,384 codes make 256 MiB in float32.
_LATENTS_AT_ONCE = 4096


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, width), width, eps=_NORM_EPS)


class ResBlock(nn.Module):
    """Two normalised 3 × 3 convolutions around a shortcut; (b, c, H, W) → (b, c', H, W)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.norm1 = _norm(width_in)
        self.conv1 = nn.Conv2d(width_in, width_out, 3, padding=1)
        self.norm2 = _norm(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1)
        if width_in != width_out:
            self.nin_shortcut = nn.Conv2d(width_in, width_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        out: Tensor = (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + hidden
        return out


class AttentionBlock(nn.Module):
    """Attention of one head over all places of a feature map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q = nn.Conv2d(width, width, 1)
        self.k = nn.Conv2d(width, width, 1)
        self.v = nn.Conv2d(width, width, 1)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (part(normed).flatten(2).mT for part in (self.q, self.k, self.v))  # (b, H·W, c)
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = x + self.proj_out(mixed.mT.reshape(x.shape))
        return out


class Downsample(nn.Module):
    """Halves a feature map; the padding is at the right and the bottom only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return out


class Upsample(nn.Module):
    """Doubles a feature map by repeating and smooths it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class Level(nn.Module):
    """The blocks of one resolution, each with attention if it `attends`, then a change of resolution."""

    def __init__(
        self, width_in: int, width_out: int, num_blocks: int, attends: bool, resample: Downsample | Upsample | None
    ) -> None:
        super().__init__()
        widths = [width_in] + [width_out] * num_blocks
        self.res = nn.ModuleList(ResBlock(one, other) for one, other in pairwise(widths))
        self.attn = nn.ModuleList(AttentionBlock(width_out) for _ in range(num_blocks if attends else 0))
        if resample is not None:
            # The two directions have two names in the public files.
            self.add_module("downsample" if isinstance(resample, Downsample) else "upsample", resample)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[index](x)
        resample = getattr(self, "downsample", None) or getattr(self, "upsample", None)
        return x if resample is None else resample(x)


def _middle(width: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(width, width), AttentionBlock(width), ResBlock(width, width)])


class Encoder(nn.Module):
    """Pixels (b, 3, H, W) → latents (b, latent_dim, h, w), `shape.factor` times smaller along each side."""

    def __init__(self, shape: VqShape) -> None:
        super().__init__()
        widths = [shape.channels * each for each in shape.multipliers]
        self.conv_in = nn.Conv2d(3, shape.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        before = shape.channels
        for index, width in enumerate(widths):
            last = index == len(widths) - 1
            down = None if last else Downsample(width)
            self.conv_blocks.append(Level(before, width, shape.num_res_blocks, last, down))
            before = width
        self.mid = _middle(before)
        self.norm_out = _norm(before)
        self.conv_out = nn.Conv2d(before, shape.latent_dim, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.conv_in(pixels)
        for block in (*self.conv_blocks, *self.mid):
            hidden = block(hidden)
        out: Tensor = self.conv_out(F.silu(self.norm_out(hidden)))
        return out


class Decoder(nn.Module):
    """Latents (b, latent_dim, h, w) → pixels (b, 3, H, W); levels from coarse to fine."""

    def __init__(self, shape: VqShape) -> None:
        super().__init__()
        widths = [shape.channels * each for each in reversed(shape.multipliers)]
        before = widths[0]
        self.conv_in = nn.Conv2d(shape.latent_dim, before, 3, padding=1)
        self.mid = _middle(before)
        self.conv_blocks = nn.ModuleList()
        for index, width in enumerate(widths):
            up = None if index == len(widths) - 1 else Upsample(width)
            self.conv_blocks.append(Level(before, width, shape.num_res_blocks + 1, index == 0, up))
            before = width
        self.norm_out = _norm(before)
        self.conv_out = nn.Conv2d(before, 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        hidden = self.conv_in(latents)
        for block in (*self.mid, *self.conv_blocks):
            hidden = block(hidden)
        out: Tensor = self.conv_out(F.silu(self.norm_out(hidden)))
        return out


class Codebook(nn.Module):
    """The table of codes, with the public files' record of the codes used last in training."""

    codebook_used: Tensor

    def __init__(self, shape: VqShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.codebook_size, shape.code_dim)
        self.register_buffer("codebook_used", torch.zeros(NUM_USED))

    def directions(self) -> Tensor:
        """The codes scaled to length 1, (V, code_dim) in float32."""
        return F.normalize(self.embedding.weight.float(), dim=-1)

    def nearest(self, latents: Tensor) -> Tensor:
        """Ids of the codes nearest to latents (…, code_dim) in direction; the lowest of several equally near."""
        flat = F.normalize(latents.float(), dim=-1).reshape(-1, latents.shape[-1])
        codes = self.directions().mT.contiguous()
        found = [(part @ codes).argmax(-1) for part in torch.split(flat, _LATENTS_AT_ONCE)]
        return torch.cat(found).reshape(latents.shape[:-1])


class Vq(nn.Module):
    """LlamaGen's tokenizer of images."""

    def __init__(self, shape: VqShape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = Encoder(shape)
        self.decoder = Decoder(shape)
        self.quantize = Codebook(shape)
        self.quant_conv = nn.Conv2d(shape.latent_dim, shape.code_dim, 1)
        self.post_quant_conv = nn.Conv2d(shape.code_dim, shape.latent_dim, 1)

    @property
    def codebook(self) -> Tensor:
        """The stored codes (V, code_dim), not scaled to any length."""
        return self.quantize.embedding.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.quant_conv.weight.dtype

    def latents(self, pixels: Tensor) -> Tensor:
        """Pixels (b, 3, H, W) in [-1, 1] → latents to compare with the codebook, (b, h, w, code_dim), of any length.

        Raises:
            ValueError: the pixels have another shape, or sides that are not multiples of the model's factor.
        """
        factor = self.shape.factor
        if pixels.ndim != 4 or pixels.shape[1] != 3 or not all(n and n % factor == 0 for n in pixels.shape[2:]):
            raise ValueError(
                f"pixels must be (images, 3, height, width) with sides that {factor} divides, not {list(pixels.shape)}"
            )
        found: Tensor = self.quant_conv(self.encoder(pixels.to(self.dtype)))
        return found.permute(0, 2, 3, 1)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels (b, 3, H, W) in [-1, 1] → codes (b, h, w), int64; the nearest code by direction.

        Raises:
            ValueError: as `latents`.
        """
        return self.quantize.nearest(self.latents(pixels))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes (b, h, w) → pixels (b, 3, H, W), nominally in [-1, 1] and not clamped.

        Raises:
            ValueError: codes of another shape, or outside the codebook; the first such is named with its place.
        """
        if codes.ndim != 3 or codes.is_floating_point():
            raise ValueError(
                f"codes must be whole numbers (images, rows, columns), not {codes.dtype} {list(codes.shape)}"
            )
        codes = codes.long()
        outside = (codes < 0) | (codes >= self.shape.codebook_size)
        if outside.any():
            place = outside.nonzero()[0].tolist()
            raise ValueError(
                f"code {int(codes[tuple(place)])} at image, row, column {place} is outside the codebook of "
                f"{self.shape.codebook_size} codes: they were drawn for another VQ model"
            )
        return self.render(self.quantize.directions()[codes])

    def render(self, directions: Tensor) -> Tensor:
        """Codes as directions (b, h, w, code_dim) → pixels (b, 3, H, W)."""
        latents = self.post_quant_conv(directions.permute(0, 3, 1, 2).to(self.dtype))
        pixels: Tensor = self.decoder(latents)
        return pixels


def square_pixels(image: NDArray[np.uint8], side_px: int) -> Tensor:
    """uint8 RGB (height, width, 3) of any size → pixels (3, side_px, side_px) in [-1, 1], fp32.

    Shrunk and cropped to the middle square as by ADM, which made the data of LlamaGen and LANTERN.
    """
    picture = Image.fromarray(image)
    while min(picture.size) >= 2 * side_px:
        # Halving by mean first keeps fine patterns from turning into others.
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = side_px / min(picture.size)
    size = (max(side_px, round(picture.width * scale)), max(side_px, round(picture.height * scale)))
    pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
    top, left = (size[1] - side_px) // 2, (size[0] - side_px) // 2
    cut = pixels[top : top + side_px, left : left + side_px].copy()
    return torch.from_numpy(cut).permute(2, 0, 1).float() / 127.5 - 1.0
