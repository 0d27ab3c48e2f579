"""Record EAGLE-3 of SafeAILab/EAGLE: `python record_eagle3.py CHECKOUT`.

`eagle.model.cnets.Model` computes everything. A forward hook on its layer and head reads the pairs, the chain and the
trees of `topK_genrate`. A second round extends the first: its features cover only the pairs that are new, and the
network continues from the keys and values of the first round.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import cases
import torch
from torch import Tensor

sys.path.insert(0, sys.argv[1])
from eagle.model.cnets import Model

NODES, DEPTH, TOP = 10, 3, 3
ROUND = 3  # pairs of the second round
NOISE = 1e-3  # noise on the head that must not change a recorded tree
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": cases.VOCAB,
    "hidden_size": cases.HIDDEN,
    "intermediate_size": cases.INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": cases.HEADS,
    "num_key_value_heads": cases.KV_HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def record(name: str, seed: int, own_embeddings: bool, **fields: Any) -> None:
    """Write the case `name`; `fields` add to CONFIG."""
    torch.manual_seed(seed)
    config = {**CONFIG, **fields}
    # The attributes that `EConfig` has under transformers 4; transformers 5 fills `rope_scaling` with other keys.
    settings = SimpleNamespace(**{"pretraining_tp": 1, "rope_scaling": None, **config})
    model = Model(settings, load_emb=False, total_tokens=NODES + 1, depth=DEPTH, top_k=TOP).eval()
    cases.fill(model, seed)
    if config["draft_vocab_size"] == cases.VOCAB:
        del model.d2t, model.t2d
    else:
        d2t, t2d = cases.draft_vocabulary(seed)
        model.d2t.copy_(d2t)
        model.t2d.copy_(t2d)
    model.init_tree()
    tokens, features = cases.inputs(seed, model.fc.in_features, cases.PAIRS + ROUND)
    seen: dict[str, list[Tensor]] = {"fed": [], "logits": []}
    model.midlayer.register_forward_pre_hook(
        lambda _, __, kwargs: seen["fed"].append(kwargs["hidden_states"][0]), with_kwargs=True
    )
    rounds = (tokens[: cases.PAIRS + 1], features[: cases.PAIRS]), (tokens, features[cases.PAIRS :])
    with torch.no_grad():
        recorded = {
            "tokens": tokens[: cases.PAIRS + 1],
            "features": features[: cases.PAIRS],
            "positions": torch.arange(cases.PAIRS),
            **chain_outputs(model, *rounds[0], seen),
            "round.tokens": tokens,
            "round.features": features[cases.PAIRS :],
            **trees(model, rounds),
        }
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        model.lm_head.weight.add_(NOISE * torch.randn_like(model.lm_head.weight))
        if any(not torch.equal(value, recorded[key]) for key, value in trees(model, rounds).items()):
            raise ValueError(f"{name}: the scores of two candidate nodes differ by too little")
    if not own_embeddings:
        recorded["target.embed_tokens"] = weights.pop("embed_tokens.weight")
    cases.write(name, config, weights, recorded)


def chain_outputs(model: Model, tokens: Tensor, features: Tensor, seen: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """The pairs, and a chain drafted by repeated calls of the network's `forward`."""
    model.reset()
    hidden, cache = model(features[None], input_ids=tokens[None, 1:], use_cache=True)
    logits = model.lm_head(model.norm(hidden))[0]
    state = {"cache": cache}
    steps: list[Tensor] = []
    d2t = getattr(model, "d2t", None)

    def step(token: Tensor, fed: Tensor, _: int) -> tuple[Tensor, Tensor]:
        out, state["cache"] = model(
            fed[None, None], input_ids=token[None, None], past_key_values=state["cache"], use_cache=True
        )
        steps.append(out[0, 0])
        return model.lm_head(model.norm(out))[0, 0], out[0, 0]

    drafted = cases.chain(logits[-1], hidden[0, -1], d2t, step)
    return {
        "pairs.projected": seen["fed"][0],
        "pairs.hidden": hidden[0],
        "pairs.logits": logits,
        "chain.positions": len(features) + torch.arange(cases.STEPS),
        "chain.hidden": torch.stack(steps),
        **drafted,
    }


def trees(model: Model, rounds: tuple[tuple[Tensor, Tensor], ...]) -> dict[str, Tensor]:
    """The trees of both rounds."""
    model.reset_kv()
    return {**tree_outputs("tree", model, *rounds[0]), **tree_outputs("round.tree", model, *rounds[1])}


def tree_outputs(prefix: str, model: Model, tokens: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Tokens, parents, depths and mask of the tree of `topK_genrate`; node 0 is the last of `tokens`.

    The parent of a node is its deepest ancestor in the mask, and the parent of the root is -1.
    """
    drafted, _, mask, depths = model.topK_genrate(features[None], tokens[None], None, None)
    seen = mask[0, 0].bool()
    ancestors = seen & ~torch.eye(len(seen), dtype=torch.bool)
    order = torch.where(ancestors, depths[None] + 1, 0)
    parents = torch.where(ancestors.any(dim=-1), order.argmax(dim=-1), -1)
    return {
        f"{prefix}.tokens": drafted[0],
        f"{prefix}.parents": parents,
        f"{prefix}.depths": depths,
        f"{prefix}.mask": seen,
    }


if __name__ == "__main__":
    record("eagle3", 13, False, draft_vocab_size=cases.DRAFT_VOCAB)
    record("eagle3_narrow", 29, True, draft_vocab_size=cases.VOCAB, target_hidden_size=24)
