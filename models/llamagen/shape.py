"""Define the sizes of LlamaGen's networks: the GPT that generates codes and the VQ model that decodes them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

PUBLISHED_HEADS = {
    **{(768, 12): 12, (1024, 24): 16, (1280, 36): 20, (1536, 48): 24, (2560, 48): 40},
    **{(2048, 22): 32, (3200, 24): 32, (4096, 32): 32},
}
"""(dim, num_layers) → num_heads of published sizes (B, L, XL, XXL, XXXL, 1B, 3B, 7B), which weights do not show."""

MAX_TEXT_TOKENS = 120
"""Number of condition tokens of all published text models."""

GPT_TYPE, VQ_TYPE = "llamagen_gpt", "llamagen_vq"
"""`model_type` in the `config.json` of the GPT and of the VQ model."""


@dataclass(frozen=True)
class GptShape:
    """Sizes of a GPT: images have `grid` × `grid` codes, after `num_condition_tokens` text features or one class token.

    `condition_dim` is the width of text features. Raises ValueError for invalid sizes.
    """

    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    vocab_size: int
    grid: int
    condition: Literal["text", "class"]
    num_condition_tokens: int
    condition_dim: int = 2048
    num_classes: int = 1000
    rms_eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        _check_types(self)
        if self.condition not in ("text", "class"):
            raise ValueError(f"condition must be text or class, not {self.condition!r}")
        if self.dim % self.num_heads or self.head_dim % 4:
            # Half of a head's rotary pairs turn by row, half by column.
            raise ValueError(
                f"dim must be num_heads times a multiple of 4, but dim is {self.dim} and num_heads {self.num_heads}"
            )
        if self.condition == "class" and self.num_condition_tokens != 1:
            raise ValueError(f"a class is one condition column, not {self.num_condition_tokens}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def num_image_tokens(self) -> int:
        return self.grid * self.grid

    def to_config(self) -> dict[str, Any]:
        """Return the contents of `config.json`."""
        return {"model_type": GPT_TYPE} | asdict(self)


@dataclass(frozen=True)
class VqShape:
    """Sizes of a VQ model: `codebook_size` codes of `code_dim` numbers; each multiplier but the first halves the image.

    Raises ValueError for invalid sizes.
    """

    codebook_size: int
    code_dim: int = 8
    channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    latent_dim: int = 256

    def __post_init__(self) -> None:
        _check_types(self)
        if not self.multipliers:
            raise ValueError("multipliers must name at least one level")
        for width in {self.channels * each for each in self.multipliers}:
            # Normalisation has 32 groups of channels, or one per channel below that.
            if width % min(32, width):
                raise ValueError(f"every level must be at most 32 channels wide or a multiple of 32, not {width}")

    @property
    def factor(self) -> int:
        """Pixels per code along one side: 16 or 8 in the published models."""
        return int(2 ** (len(self.multipliers) - 1))

    def to_config(self) -> dict[str, Any]:
        """Return the contents of `config.json`."""
        return {"model_type": VQ_TYPE} | asdict(self) | {"multipliers": list(self.multipliers)}


def _check_types(shape: GptShape | VqShape) -> None:
    """Raise ValueError unless every size is a positive integer, or a positive float for `rms_eps` and `rope_base`."""
    for name, value in vars(shape).items():
        is_real = name in ("rms_eps", "rope_base")
        kind = (int, float) if is_real else int
        numbers = value if name == "multipliers" and isinstance(value, tuple) else (value,)
        good = all(isinstance(n, kind) and not isinstance(n, bool) and 0 < n < math.inf for n in numbers)
        if name != "condition" and not good:
            raise ValueError(f"{name} must be a positive {'' if is_real else 'whole '}number, not {value!r}")
