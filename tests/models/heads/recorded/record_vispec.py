"""Record ViSpec: `python record_vispec.py CHECKOUT` (a checkout of KangJialiang/ViSpec, transformers 4.49).

`vispec.model.cnets_ours.Model.forward` computes everything, called as `topK_genrate` does: the pairs of a prompt with
one image, a chain, the pairs of a second round on the same cache, and the pairs of a prompt without an image.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import cases
import torch
from torch import Tensor, nn

sys.path.insert(0, sys.argv[1])
from vispec.model.cnets_ours import Model
from vispec.model.configs import EConfig

ROUND = 3
IMAGE = slice(2, 6)  # tokens of the prompt that are image tokens
CONFIG: dict[str, Any] = {
    "vocab_size": cases.VOCAB,
    "hidden_size": cases.HIDDEN,
    "intermediate_size": cases.INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": cases.HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def record(name: str, seed: int, queries: int, **fields: Any) -> None:
    """Write the case `name`; the adaptor has `queries` queries, and `fields` add to CONFIG."""
    config = {**CONFIG, **fields}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = Model(EConfig.from_pretrained(folder), bias=config.get("bias", True), num_q=queries).eval()
    cases.fill(model, seed, gain=0.8)
    target = nn.Linear(cases.HIDDEN, cases.VOCAB, bias=False)
    cases.fill(target, seed + 1000)
    tokens, features = cases.inputs(seed, cases.HIDDEN, cases.PAIRS + ROUND)
    embeds = model.embed_tokens(tokens).detach().clone()
    visual = torch.zeros(1, cases.PAIRS, dtype=torch.bool)
    visual[0, IMAGE] = True
    embeds[IMAGE] = cases.inputs(seed + 2000, cases.HIDDEN, IMAGE.stop - IMAGE.start)[1]
    with torch.no_grad():
        recorded = {
            "tokens": tokens[: cases.PAIRS + 1],
            "features": features[: cases.PAIRS],
            "embeds": embeds[: cases.PAIRS],
            "visual": visual[0],
            "target.lm_head": target.weight,
            **outputs(model, target, tokens, features, embeds, visual),
        }
        model.reset_kv()
        hidden = model(features[None], input_ids=tokens[None, 1:])[0]
        recorded |= {"text.tokens": tokens, "text.features": features, "text.hidden": hidden}
    cases.write(name, config, model.state_dict(), recorded)


def outputs(
    model: Model, target: nn.Linear, tokens: Tensor, features: Tensor, embeds: Tensor, visual: Tensor
) -> dict[str, Tensor]:
    """The pairs of the prompt, a chain, and the pairs of the second round."""
    seen: dict[str, list[Tensor]] = {"inputs": [], "positions": [], "adapted": []}

    def before_layer(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen["inputs"].append(args[0][0])
        seen["positions"].append(kwargs["position_ids"][0])

    hooks = [
        model.layers[0].register_forward_pre_hook(before_layer, with_kwargs=True),
        model.imadpt.register_forward_hook(lambda _, __, out: seen["adapted"].append(out[0])),
    ]
    hidden, cache = model(
        features[None, : cases.PAIRS],
        inputs_embeds=embeds[None, 1 : cases.PAIRS + 1],
        use_cache=True,
        image_mask=visual,
    )
    state, steps = {"cache": cache}, []

    def step(token: Tensor, fed: Tensor, index: int) -> tuple[Tensor, Tensor]:
        out, state["cache"] = model(
            fed[None, None],
            input_ids=token[None, None],
            past_key_values=state["cache"],
            position_ids=torch.tensor([[cases.PAIRS + index]]),
            use_cache=True,
        )
        steps.append(out[0, 0])
        return target(out)[0, 0], out[0, 0]

    drafted = cases.chain(target(hidden)[0, -1], hidden[0, -1], None, step)
    later = model(
        features[None, cases.PAIRS :],
        input_ids=tokens[None, cases.PAIRS + 1 :],
        past_key_values=cache,
        use_cache=True,
    )[0][0]
    for hook in hooks:
        hook.remove()
    return {
        "positions": torch.arange(cases.PAIRS),
        "image.adapted": seen["adapted"][0],
        "compressed.inputs": seen["inputs"][0],
        "compressed.positions": seen["positions"][0],
        "pairs.hidden": hidden[0],
        "pairs.logits": target(hidden)[0],
        **drafted,
        "chain.positions": cases.PAIRS + torch.arange(cases.STEPS),
        "chain.hidden": torch.stack(steps),
        "round.tokens": tokens,
        "round.features": features[cases.PAIRS :],
        "round.positions": seen["positions"][-1],
        "round.hidden": later,
    }


if __name__ == "__main__":
    qwen = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6}
    llava = {"architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next", "rms_norm_eps": 1e-5}
    record("vispec_qwen", 1, 2, **qwen, num_key_value_heads=cases.KV_HEADS, rope_theta=1000000.0, qkv_bias=True)
    record("vispec_llava", 2, 3, **llava, num_key_value_heads=cases.HEADS, pad_token_id=0, rope_scaling=None)
