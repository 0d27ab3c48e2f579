"""The oracle of image tests: LlamaGen for one image, written out from a state dict in the published layout.

Slow on purpose and made of other parts than the engine: fused projections, complex rotation of neighbouring pairs, the
whole model over the whole sequence anew for every code, no memory, no batch, no drafts. Imports none of the project.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Choose = Callable[[int, Tensor], int]
"""Index of the code in the image, fp32 logits (V,) after all filters (−inf where removed) → the code."""


def greedy(_position: int, logits: Tensor) -> int:
    return int(logits.argmax())


@dataclass(frozen=True)
class ReferenceSampling:
    """As LlamaGen's command line has them; `cfg_interval` −1 guides every code, `temperature` 0 filters nothing."""

    cfg_scale: float = 1.0
    cfg_interval: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class LlamaGenReference:
    """One model: `weights` under the published names, text-conditional where they hold a caption projection."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        num_heads: int,
        grid: int,
        rms_eps: float = 1e-5,
        rope_base: float = 10000.0,
    ) -> None:
        self.weights = weights
        self.num_heads, self.grid, self.rms_eps, self.rope_base = num_heads, grid, rms_eps, rope_base
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
        self.dim = weights["tok_embeddings.weight"].shape[1]
        self.is_text = "cls_embedding.uncond_embedding" in weights
        self.num_columns = weights["cls_embedding.uncond_embedding"].shape[0] if self.is_text else 1

    @torch.inference_mode()
    def generate(
        self, condition: Tensor | int, sampling: ReferenceSampling, choose: Choose, num_tokens: int | None = None
    ) -> list[int]:
        """Codes in raster order; `condition` is a text's valid features (l, condition_dim), or a class label."""
        prompt, null, padding = self.prompts(condition)
        tokens: list[int] = []
        while len(tokens) < (self.grid**2 if num_tokens is None else num_tokens):
            logits = self.next_logits(prompt, padding, tokens)
            guided = sampling.cfg_interval == -1 or len(tokens) <= sampling.cfg_interval + 1
            if sampling.cfg_scale > 1.0 and guided:
                without = self.next_logits(null, padding, tokens)
                logits = without + sampling.cfg_scale * (logits - without)
            tokens.append(choose(len(tokens), filter_logits(logits, sampling)))
        return tokens

    def prompts(self, condition: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (L, D) with and without the condition, and which columns (L,) are padding in both."""
        if not self.is_text:
            assert isinstance(condition, int)
            table = self.weights["cls_embedding.embedding_table.weight"]
            return table[condition][None], table[-1][None], torch.zeros(1, dtype=torch.bool)
        assert isinstance(condition, Tensor)
        null = self.weights["cls_embedding.uncond_embedding"]
        num_padding = self.num_columns - len(condition)
        features = torch.cat([torch.zeros(num_padding, null.shape[1]), condition]).to(null.dtype)
        padding = torch.arange(self.num_columns) < num_padding
        return self._project(features), self._project(null), padding

    def next_logits(self, prompt: Tensor, padding: Tensor, tokens: list[int]) -> Tensor:
        """fp32 logits (V,) of the code after `tokens`."""
        return (self.states(prompt, padding, tokens)[-1] @ self.weights["output.weight"].T).float()

    def states(self, prompt: Tensor, padding: Tensor, tokens: list[int]) -> Tensor:
        """Hidden states (L + T, D) after the final norm, over the prompt and all of `tokens`."""
        embeds = self.weights["tok_embeddings.weight"][torch.tensor(tokens, dtype=torch.long)]
        hidden = torch.cat([prompt, embeds])
        length = len(hidden)
        rotation = turns(length, self.dim // self.num_heads, self.num_columns, self.grid, self.rope_base)
        seen = torch.ones(length, length).tril().bool()
        seen[:, : len(padding)] &= ~padding
        seen |= torch.eye(length).bool()
        for index in range(self.num_layers):
            hidden = hidden + self._attend(index, self._norm(hidden, f"layers.{index}.attention_norm"), rotation, seen)
            hidden = hidden + self._feed_forward(index, self._norm(hidden, f"layers.{index}.ffn_norm"))
        return self._norm(hidden, "norm")

    def _attend(self, index: int, x: Tensor, rotation: Tensor, seen: Tensor) -> Tensor:
        query, key, value = (x @ self.weights[f"layers.{index}.attention.wqkv.weight"].T).chunk(3, dim=-1)
        heads = []
        size = self.dim // self.num_heads
        for head in range(self.num_heads):
            span = slice(head * size, (head + 1) * size)
            scores = turn(query[:, span], rotation) @ turn(key[:, span], rotation).T / size**0.5
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, span])
        return torch.cat(heads, dim=-1) @ self.weights[f"layers.{index}.attention.wo.weight"].T

    def _feed_forward(self, index: int, x: Tensor) -> Tensor:
        w1, w2, w3 = (self.weights[f"layers.{index}.feed_forward.w{i}.weight"] for i in (1, 2, 3))
        return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + self.rms_eps).sqrt()
        return scaled.to(x.dtype) * self.weights[f"{name}.weight"]

    def _project(self, features: Tensor) -> Tensor:
        inner = features @ self.weights["cls_embedding.cap_proj.fc1.weight"].T
        return F.gelu(inner, approximate="tanh") @ self.weights["cls_embedding.cap_proj.fc2.weight"].T


def filter_logits(logits: Tensor, sampling: ReferenceSampling) -> Tensor:
    """Temperature, then top-k (ties with the k-th stay), then the smallest set whose mass exceeds top-p."""
    if sampling.temperature == 0:
        return logits
    out = logits / sampling.temperature
    if sampling.top_k > 0:
        kth = out.sort(descending=True).values[min(sampling.top_k, len(out)) - 1]
        out = torch.where(out < kth, -torch.inf, out)
    if sampling.top_p < 1.0:
        mass = 0.0
        kept = torch.full_like(out, -torch.inf)
        probabilities = out.softmax(-1)
        for token in out.argsort(descending=True).tolist():
            if mass > sampling.top_p:
                break
            kept[token] = out[token]
            mass += float(probabilities[token])
        out = kept
    return out


def turns(length: int, head_dim: int, num_zero: int, grid: int, rope_base: float = 10000.0) -> Tensor:
    """Complex turns (length, D_h / 2): `num_zero` rows of zeros, then by row (first half of the pairs) and column."""
    half = head_dim // 2
    table = torch.zeros(length, half, dtype=torch.complex128)
    for index in range(num_zero, length):
        row, column = divmod(index - num_zero, grid)
        for pair in range(half // 2):
            speed = rope_base ** (-2 * pair / half)
            table[index, pair] = complex(math.cos(row * speed), math.sin(row * speed))
            table[index, half // 2 + pair] = complex(math.cos(column * speed), math.sin(column * speed))
    return table


def turn(x: Tensor, rotation: Tensor) -> Tensor:
    """One head's queries or keys (T, D_h), neighbouring dimensions as complex numbers, turned."""
    pairs = torch.view_as_complex(x.double().reshape(len(x), -1, 2).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(1).to(x.dtype)
