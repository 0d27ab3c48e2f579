"""Record MSD: `python record_msd.py CHECKOUT/EAGLE` (a checkout of Lyn-Lucy/MSD, transformers 4.49).

`eagle.model.cnets.Model.forward` computes everything, called as `topK_genrate` does: the pairs of a prompt with one
image, a chain, and the pairs of a second round on the same cache. The code has constants for token ids and for the 576
image tokens of LLaVA-1.5: the number of image tokens is an argument of `forward`, and `Embedding` maps the vision
tokens of Qwen2-VL to ids of the tiny vocabulary.
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
from eagle.model.cnets import Model
from eagle.model.configs import EConfig, Qwen2VLConfig
from eagle.model.utils import temp_cache

ROUND = 3
IMAGE = slice(2, 6)  # tokens of the prompt that are image tokens
PLACEHOLDER = -200  # LLaVA: one id for all image tokens
VISION = {60: 151652, 61: 151653, 62: 151655}  # Qwen2-VL: start, end, image token, by id of the tiny vocabulary
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


class Embedding(nn.Embedding):
    """Accepts the vision tokens of Qwen2-VL."""

    def forward(self, ids: Tensor) -> Tensor:
        for small, large in VISION.items():
            ids = torch.where(ids == large, small, ids)
        return super().forward(ids)


def record(name: str, seed: int, config_class: type, **fields: Any) -> None:
    """Write the case `name`; `fields` add to CONFIG."""
    config = {**CONFIG, **fields}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = Model(config_class.from_pretrained(folder), bias=config.get("bias", True)).eval()
    model.embed_tokens = Embedding(cases.VOCAB, cases.HIDDEN).requires_grad_(False)
    cases.fill(model, seed, gain=0.8)
    target = nn.Linear(cases.HIDDEN, cases.VOCAB, bias=False)
    cases.fill(target, seed + 1000)
    tokens, features = cases.inputs(seed, cases.HIDDEN, cases.PAIRS + ROUND)
    tokens = tokens.clamp(1, min(VISION) - 1)  # the code takes a first token 0 for padding
    if config["model_type"] == "qwen2_vl":
        start, end, image = VISION
        tokens[IMAGE.start - 1], tokens[IMAGE.stop], tokens[IMAGE] = start, end, image
    embeds = model.embed_tokens(tokens).clone()
    embeds[IMAGE] = cases.inputs(seed + 2000, cases.HIDDEN, IMAGE.stop - IMAGE.start)[1]
    visual = torch.zeros(cases.PAIRS, dtype=torch.bool)
    visual[IMAGE] = True
    with torch.no_grad():
        recorded = {
            "tokens": tokens[: cases.PAIRS + 1],
            "features": features[: cases.PAIRS],
            "embeds": embeds[: cases.PAIRS],
            "visual": visual,
            "target.lm_head": target.weight,
            **outputs(model, target, published(config, tokens), tokens, features, embeds),
        }
    cases.write(name, config, model.state_dict(), recorded)


def published(config: dict[str, Any], tokens: Tensor) -> Tensor:
    """Ids of the prompt and the token after it, as the code expects them."""
    prompt = tokens[: cases.PAIRS + 1]
    if config["model_type"] == "llava":
        return torch.cat([prompt[: IMAGE.start], torch.tensor([PLACEHOLDER]), prompt[IMAGE.stop :]])
    for small, large in VISION.items():
        prompt = torch.where(prompt == small, large, prompt)
    return prompt


def outputs(
    model: Model, target: nn.Linear, prompt: Tensor, tokens: Tensor, features: Tensor, embeds: Tensor
) -> dict[str, Tensor]:
    """The pairs of the prompt, a chain, and the pairs of the second round."""
    seen: list[Tensor] = []
    hook = model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    hidden, cache = model(
        features[None, : cases.PAIRS],
        input_ids=prompt[None, 1:],
        inputs_embeds=embeds[None, 1 : cases.PAIRS + 1],
        use_cache=True,
        image_tokens_num=[IMAGE.stop - IMAGE.start],
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
    hook.remove()
    return {
        "positions": torch.arange(cases.PAIRS),
        "pairs.inputs": seen[0],
        "pairs.hidden": hidden[0],
        "pairs.logits": target(hidden)[0],
        **drafted,
        "chain.positions": cases.PAIRS + torch.arange(cases.STEPS),
        "chain.hidden": torch.stack(steps),
        "round.tokens": tokens,
        "round.features": features[cases.PAIRS :],
        "round.hidden": later,
    }


if __name__ == "__main__":
    temp_cache.use_msd = True
    llava = {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava", "pad_token_id": 0}
    qwen = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "rope_theta": 1000000.0,
    }
    record("msd_llava", 1, EConfig, **llava, num_key_value_heads=cases.HEADS, rms_norm_eps=1e-5, rope_scaling=None)
    record("msd_qwen", 2, Qwen2VLConfig, **qwen, num_key_value_heads=cases.KV_HEADS, rms_norm_eps=1e-6)
