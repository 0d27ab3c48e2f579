"""Shared by the scripts of this folder: seeded weights, the greedy chain, and the files of a case.

A case is a folder with a tiny random checkpoint in a published layout (`config.json`, `model.safetensors`, stored in
bfloat16) and `recorded.safetensors` (inputs and outputs in float32, computed by the public code with the stored
weights converted to float32). README.md gives the tensors. Nothing here imports draftfleet.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parent
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 32, 4, 2, 48
VOCAB, DRAFT_VOCAB = 64, 24
PAIRS, STEPS = 9, 4
MARGIN = 1e-2  # smallest gap between the two largest logits at a recorded argmax
DISTINCT = 4  # smallest number of different tokens in a chain or in the first block

Step = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def fill(network: nn.Module, seed: int, gain: float = 1.5) -> None:
    """Fill all parameters with normal noise of a size that fits their kind, rounded to bfloat16.

    `gain` is that of linear weights; heads without a norm on the fed-back state need less than 1, or their chain grows.
    Norm weights differ from 1 so that a missing or misplaced norm changes the outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                values = noise
            elif name.endswith("bias"):
                values = 0.3 * noise
            elif parameter.dim() == 1:
                values = 1 + 0.3 * noise
            else:
                values = gain * noise / parameter.shape[-1] ** 0.5
            parameter.copy_(values.to(torch.bfloat16))


def draft_vocabulary(seed: int) -> tuple[Tensor, Tensor]:
    """`d2t` (DRAFT_VOCAB,) int64 offsets and `t2d` (VOCAB,) bool of a random subset of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[chosen] = True
    return chosen - torch.arange(DRAFT_VOCAB), mask


def inputs(seed: int, width: int, pairs: int = PAIRS) -> tuple[Tensor, Tensor]:
    """Token ids (pairs + 1,) and target features (pairs, width) float32; feature t belongs to token t."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (pairs + 1,), generator=generator)
    return tokens, torch.randn(pairs, width, generator=generator)


def greedy(logits: Tensor, d2t: Tensor | None) -> Tensor:
    """Target id () of the largest logit (draft vocabulary,).

    Raises:
        ValueError: the two largest logits differ by less than MARGIN; choose another seed.
    """
    top = logits.topk(2)
    if float(top.values[0] - top.values[1]) < MARGIN:
        raise ValueError(f"the two largest logits differ by {float(top.values[0] - top.values[1]):.2g}")
    return top.indices[0] if d2t is None else top.indices[0] + d2t[top.indices[0]]


def chain(first_logits: Tensor, first_fed: Tensor, d2t: Tensor | None, step: Step) -> dict[str, Tensor]:
    """Draft STEPS further tokens greedily.

    `step(token, fed, index)` runs the network on one pair (embedding of `token` (), fed-back state (H,)) and returns
    the logits and the next fed-back state.
    """
    tokens, fed, logits = [], [], []
    last_logits, last_fed = first_logits, first_fed
    for index in range(STEPS):
        token = greedy(last_logits, d2t)
        tokens.append(token)
        fed.append(last_fed)
        last_logits, last_fed = step(token, last_fed, index)
        logits.append(last_logits)
    tokens.append(greedy(last_logits, d2t))
    return {
        "chain.tokens": torch.stack(tokens),
        "chain.fed": torch.stack(fed),
        "chain.logits": torch.stack(logits),
    }


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint that the public code wrote."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def write(name: str, config: dict[str, Any], weights: dict[str, Tensor], recorded: dict[str, Tensor]) -> None:
    """Write the three files of the case `name`; floating-point weights are stored in bfloat16.

    Raises:
        ValueError: an output is not finite, or drafted tokens repeat and so test little; choose another seed.
    """
    drafted = recorded["chain.tokens"] if "chain.tokens" in recorded else recorded["first.tokens"]
    if len(set(drafted.tolist())) < DISTINCT:
        raise ValueError(f"{name}: fewer than {DISTINCT} different tokens are drafted")
    for key, value in recorded.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"{name}: {key} is not finite")
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    stored = {
        key: (value.detach().to(torch.bfloat16) if value.is_floating_point() else value).contiguous().clone()
        for key, value in weights.items()
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(
        {key: value.detach().contiguous().clone() for key, value in recorded.items()}, folder / "recorded.safetensors"
    )
