"""Record DFlash of z-lab/dflash: `python record_dflash.py CHECKOUT`.

`DFlashDraftModel.forward` computes two rounds with one cache, called as `dflash_generate` does: the block is the last
token and mask tokens, the cache is cut to the context after each round, and the second round passes only the features
of the new tokens. The target's embedding and head are random.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import cases
import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config

sys.path.insert(0, sys.argv[1])
from dflash.model import DFlashDraftModel

BLOCK, MASK, ROUND = 5, 63, 3
LAYERS = [1, 3, 4]


def record(name: str, seed: int) -> None:
    """Write the case `name`."""
    config = Qwen3Config(
        architectures=["DFlashDraftModel"],
        vocab_size=cases.VOCAB,
        hidden_size=cases.HIDDEN,
        intermediate_size=cases.INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=cases.HEADS,
        num_key_value_heads=cases.KV_HEADS,
        head_dim=16,
        rope_theta=1000000.0,
        max_position_embeddings=256,
        block_size=BLOCK,
        num_target_layers=6,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": LAYERS},
        dtype="bfloat16",
        attn_implementation="eager",
    )
    model = DFlashDraftModel(config).eval()
    cases.fill(model, seed)
    target = nn.ModuleDict(
        {"embed": nn.Embedding(cases.VOCAB, cases.HIDDEN), "head": nn.Linear(cases.HIDDEN, cases.VOCAB, bias=False)}
    )
    cases.fill(target, seed + 1000)
    tokens, features = cases.inputs(seed, model.fc.in_features, cases.PAIRS + ROUND)
    cache = DynamicCache()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        recorded = {
            "tokens": tokens,
            "features": features,
            "target.embed_tokens": target["embed"].weight,
            "target.lm_head": target["head"].weight,
            "context.projected": model.hidden_norm(model.fc(features)),
            **block("first", model, target, cache, tokens[: cases.PAIRS + 1], features[: cases.PAIRS]),
            **block("second", model, target, cache, tokens, features[cases.PAIRS :]),
        }
        config.save_pretrained(folder)
        written = cases.read_config(Path(folder))
    cases.write(name, written, model.state_dict(), recorded)


def block(
    prefix: str, model: DFlashDraftModel, target: nn.ModuleDict, cache: DynamicCache, tokens: Tensor, features: Tensor
) -> dict[str, Tensor]:
    """One block after `tokens`, whose last one has no feature; `features` are those of tokens that are not cached."""
    start = len(tokens) - 1
    ids = torch.cat([tokens[-1:], torch.full((BLOCK - 1,), MASK)])
    positions = torch.arange(cache.get_seq_length(), start + BLOCK)
    hidden = model(
        target_hidden=features[None],
        noise_embedding=target["embed"](ids)[None],
        position_ids=positions[None],
        past_key_values=cache,
        use_cache=True,
        is_causal=False,
    )[0]
    cache.crop(start - cache.get_seq_length())
    logits = target["head"](hidden[1 - BLOCK :])
    drafted = [cases.greedy(row, None) for row in logits]
    return {
        f"{prefix}.ids": ids,
        f"{prefix}.positions": positions,
        f"{prefix}.hidden": hidden,
        f"{prefix}.logits": logits,
        f"{prefix}.tokens": torch.stack(drafted),
    }


if __name__ == "__main__":
    record("dflash", 138)
