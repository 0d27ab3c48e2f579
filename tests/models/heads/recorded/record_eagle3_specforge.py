"""Record EAGLE-3 of SpecForge: `python record_eagle3_specforge.py CHECKOUT` (a checkout of sgl-project/SpecForge).

`LlamaForCausalLMEagle3` computes everything: `project_hidden_states`, `embed_input_ids`, `backbone` with the cache of
its unrolled training steps, and `compute_logits`. Each unrolled step moves the tokens by one, so the chain is read at
the last pair, with the drafted tokens appended. Later positions do not reach it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import cases
import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, sys.argv[1])
from specforge.export.checkpoint_io import apply_legacy_rope_scaling
from specforge.modeling.auto import AutoDraftModelConfig
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": cases.VOCAB,
    "draft_vocab_size": cases.DRAFT_VOCAB,
    "hidden_size": cases.HIDDEN,
    "intermediate_size": cases.INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": cases.HEADS,
    "num_key_value_heads": cases.KV_HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Two text tokens, an image of 2 x 2 tokens, three text tokens; the rest pads the unrolled steps.
IMAGE = [[0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]]


def record(name: str, seed: int, positions: Tensor, **fields: Any) -> None:
    """Write the case `name`; `positions` is (1, pairs) or, for M-RoPE, (3, 1, pairs), and `fields` add to CONFIG."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.json"
        source.write_text(json.dumps({**CONFIG, **fields}), encoding="utf-8")
        model = LlamaForCausalLMEagle3(AutoDraftModelConfig.from_file(str(source))).eval()
        cases.fill(model, seed)
        d2t, t2d = cases.draft_vocabulary(seed)
        model.d2t.copy_(d2t)
        model.t2d.copy_(t2d)
        exported = {key: value for key, value in model.state_dict().items() if "embed" not in key}
        model.save_pretrained(folder, state_dict=exported)
        apply_legacy_rope_scaling(folder)
        config, weights = (
            {**cases.read_config(Path(folder)), "dtype": "bfloat16"},
            load_file(f"{folder}/model.safetensors"),
        )
    tokens, features = cases.inputs(seed, 3 * model.target_hidden_size)
    recorded = {"tokens": tokens, "features": features, "positions": positions.squeeze(-2)}
    recorded["target.embed_tokens"] = model.embed_tokens.weight
    cases.write(name, config, weights, {**recorded, **outputs(model, tokens, features, positions)})


def outputs(model: LlamaForCausalLMEagle3, tokens: Tensor, features: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Run the unrolled steps once for each drafted token and return the tensors of the last run."""
    drafted = tokens[1:].tolist()
    padded = torch.cat([features, torch.zeros(cases.STEPS, features.shape[1])])
    later = positions[..., -1:] + 1 + torch.arange(cases.STEPS)
    for step in range(cases.STEPS + 1):
        input_ids = torch.tensor(drafted + [0] * (cases.STEPS - step))
        seen = run(model, input_ids, padded, torch.cat([positions, later], dim=-1))
        drafted.append(int(cases.greedy(seen["logits"][step][cases.PAIRS - 1], model.d2t)))
    last = cases.PAIRS - 1
    at = positions.squeeze(-2)[..., last]
    return {
        "pairs.projected": seen["fed"][0][: cases.PAIRS],
        "pairs.hidden": seen["hidden"][0][: cases.PAIRS],
        "pairs.logits": seen["logits"][0][: cases.PAIRS],
        "chain.tokens": torch.tensor(drafted[cases.PAIRS :]),
        "chain.positions": torch.stack([at + 1 + step for step in range(cases.STEPS)]),
        "chain.fed": torch.stack([fed[last] for fed in seen["fed"][1:]]),
        "chain.hidden": torch.stack([hidden[last] for hidden in seen["hidden"][1:]]),
        "chain.logits": torch.stack([logits[last] for logits in seen["logits"][1:]]),
    }


def run(
    model: LlamaForCausalLMEagle3, input_ids: Tensor, features: Tensor, positions: Tensor
) -> dict[str, list[Tensor]]:
    """Inputs and outputs of the layer at every unrolled step, without the batch axis."""
    seen: dict[str, list[Tensor]] = {"fed": [], "hidden": [], "logits": []}
    count, cache = len(input_ids), [[], []]
    with torch.no_grad():
        hidden = model.project_hidden_states(features[None])
        mask = model.prepare_decoder_attention_mask(torch.ones(1, count, dtype=torch.bool), hidden, 1, count, 0)
        for step in range(cases.STEPS + 1):
            moved = torch.cat([input_ids[step:], input_ids.new_zeros(step)])
            seen["fed"].append(hidden[0])
            hidden = model.backbone(model.embed_input_ids(moved[None]), hidden, cache, mask, positions)
            seen["hidden"].append(hidden[0])
            seen["logits"].append(model.compute_logits(hidden)[0])
    return seen


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    plain, image = torch.arange(cases.PAIRS)[None], torch.tensor(IMAGE)[:, None]
    mrope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    record("eagle3_specforge", 17, plain, rope_theta=10000.0, fc_norm=True)
    record("eagle3_specforge_mrope", 15, image, rope_theta=1000000.0, rope_scaling=mrope, head_dim=16)
