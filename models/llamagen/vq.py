"""Define LlamaGen's VQ model, a convolutional network as in taming-transformers that maps pixels to codes and back.

Modules have the names of public files. Encoder outputs and codes are scaled to length 1 when they are compared; the
stored codebook is not normalised.
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
"""Length of the buffer `codebook_used` in public files, the codes used last in training."""
_NORM_EPS = 1e-6
# Number of latents compared with the whole codebook at once: 256 MiB of float32 for 16,384 codes.
_LATENTS_AT_ONCE = 4096


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, width), width, eps=_NORM_EPS)


class VqResBlock(nn.Module):
    """Residual block of two 3 × 3 convolutions with group norm; (b, c, H, W) → (b, c', H, W)."""

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
    """Residual single-head attention over all pixels of a feature map (b, c, H, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (part(normed).flatten(2).mT for part in (self.q, self.k, self.v))  # (b, H·W, c)
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = x + self.proj_out(mixed.mT.reshape(x.shape))
        return out


class Downsample(nn.Module):
    """Strided convolution that halves height and width; pads right and bottom only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return out


class Upsample(nn.Module):
    """Nearest-neighbour upsampling by 2, then a 3 × 3 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class VqLevel(nn.Module):
    """Residual blocks of one resolution, each followed by attention if `attends`, then an optional `resample`."""

    def __init__(
        self, width_in: int, width_out: int, num_blocks: int, attends: bool, resample: Downsample | Upsample | None
    ) -> None:
        super().__init__()
        widths = [width_in] + [width_out] * num_blocks
        self.res = nn.ModuleList(VqResBlock(width, next_width) for width, next_width in pairwise(widths))
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
    return nn.ModuleList([VqResBlock(width, width), AttentionBlock(width), VqResBlock(width, width)])


class Encoder(nn.Module):
    """Encoder from pixels (b, 3, H, W) to latents (b, latent_dim, H / f, W / f), f = `shape.factor`."""

    def __init__(self, shape: VqShape) -> None:
        super().__init__()
        widths = [shape.channels * each for each in (1, *shape.multipliers)]
        self.conv_in = nn.Conv2d(3, shape.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for index, (before, width) in enumerate(pairwise(widths)):
            last = index == len(shape.multipliers) - 1
            down = None if last else Downsample(width)
            self.conv_blocks.append(VqLevel(before, width, shape.num_res_blocks, last, down))
        self.mid = _middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], shape.latent_dim, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.conv_in(pixels)
        for block in (*self.conv_blocks, *self.mid):
            hidden = block(hidden)
        out: Tensor = self.conv_out(F.silu(self.norm_out(hidden)))
        return out


class Decoder(nn.Module):
    """Decoder from latents (b, latent_dim, h, w) to pixels (b, 3, H, W), from coarse to fine levels."""

    def __init__(self, shape: VqShape) -> None:
        super().__init__()
        widths = [shape.channels * each for each in reversed(shape.multipliers)]
        self.conv_in = nn.Conv2d(shape.latent_dim, widths[0], 3, padding=1)
        self.mid = _middle(widths[0])
        self.conv_blocks = nn.ModuleList()
        for index, (before, width) in enumerate(pairwise([widths[0], *widths])):
            up = None if index == len(widths) - 1 else Upsample(width)
            self.conv_blocks.append(VqLevel(before, width, shape.num_res_blocks + 1, index == 0, up))
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        hidden = self.conv_in(latents)
        for block in (*self.mid, *self.conv_blocks):
            hidden = block(hidden)
        out: Tensor = self.conv_out(F.silu(self.norm_out(hidden)))
        return out


class Codebook(nn.Module):
    """Code embeddings, with the buffer `codebook_used` of public files."""

    codebook_used: Tensor

    def __init__(self, shape: VqShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.codebook_size, shape.code_dim)
        self.register_buffer("codebook_used", torch.zeros(NUM_USED))

    def directions(self) -> Tensor:
        """Return the codes scaled to length 1, (V, code_dim) in float32."""
        return F.normalize(self.embedding.weight.float(), dim=-1)

    def nearest(self, latents: Tensor) -> Tensor:
        """Return the ids (…) of the codes with the highest cosine to latents (…, code_dim); the lowest id in a tie."""
        flat = F.normalize(latents.float(), dim=-1).reshape(-1, latents.shape[-1])
        codes = self.directions().mT.contiguous()
        ids = [(part @ codes).argmax(-1) for part in torch.split(flat, _LATENTS_AT_ONCE)]
        return torch.cat(ids).reshape(latents.shape[:-1])


class Vq(nn.Module):
    """LlamaGen's image tokenizer: encoder, codebook and decoder."""

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
        """Stored codes (V, code_dim), not normalised."""
        return self.quantize.embedding.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.quant_conv.weight.dtype

    def latents(self, pixels: Tensor) -> Tensor:
        """Compute unnormalised latents (b, h, w, code_dim) of pixels (b, 3, H, W) in [-1, 1].

        Raises ValueError for other shapes, and for sides that are not multiples of the model's factor.
        """
        factor = self.shape.factor
        if pixels.ndim != 4 or pixels.shape[1] != 3 or not all(n and n % factor == 0 for n in pixels.shape[2:]):
            raise ValueError(
                f"pixels must be (images, 3, height, width) with sides that {factor} divides, not {list(pixels.shape)}"
            )
        latents: Tensor = self.quant_conv(self.encoder(pixels.to(self.dtype)))
        return latents.permute(0, 2, 3, 1)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels (b, 3, H, W) in [-1, 1] as codes (b, h, w), int64; raises ValueError as `latents` does."""
        return self.quantize.nearest(self.latents(pixels))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes (b, h, w) to pixels (b, 3, H, W), nominally in [-1, 1] and not clamped.

        Raises ValueError for a wrong shape or codes outside the codebook; the message names the first.
        """
        if codes.ndim != 3 or codes.is_floating_point():
            raise ValueError(f"codes must be whole numbers (images, rows, columns), not {codes.dtype} {[*codes.shape]}")
        codes = codes.long()
        outside = (codes < 0) | (codes >= self.shape.codebook_size)
        if outside.any():
            index = outside.nonzero()[0].tolist()
            raise ValueError(
                f"code {int(codes[tuple(index)])} at image, row, column {index} is outside the codebook of "
                f"{self.shape.codebook_size} codes: they were drawn for another VQ model"
            )
        return self.render(self.quantize.directions()[codes])

    def render(self, directions: Tensor) -> Tensor:
        """Decode codes of length 1 (b, h, w, code_dim) to pixels (b, 3, H, W)."""
        latents = self.post_quant_conv(directions.permute(0, 3, 1, 2).to(self.dtype))
        pixels: Tensor = self.decoder(latents)
        return pixels


def square_pixels(image: NDArray[np.uint8], side_px: int) -> Tensor:
    """Convert uint8 RGB (height, width, 3) of any size to pixels (3, side_px, side_px) in [-1, 1], fp32.

    Resizes and center-crops as ADM's code does, which prepared the data of LlamaGen and LANTERN.
    """
    picture = Image.fromarray(image)
    while min(picture.size) >= 2 * side_px:
        # Halving with a box filter first avoids aliasing.
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = side_px / min(picture.size)
    size = (max(side_px, round(picture.width * scale)), max(side_px, round(picture.height * scale)))
    pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
    top, left = (size[1] - side_px) // 2, (size[0] - side_px) // 2
    cut = pixels[top : top + side_px, left : left + side_px].copy()
    return torch.from_numpy(cut).permute(2, 0, 1).float() / 127.5 - 1.0
