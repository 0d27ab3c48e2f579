"""Record EAGLE-3 of the `speculators` package: `python record_eagle3_speculators.py` (package installed).

`Eagle3DraftModel.forward` computes everything: hooks read the inputs and outputs of its modules. Its unrolled steps
take the tokens of its `input_ids`, shifted by one a step; the chain is read at the last pair, with the drafted tokens
appended to `input_ids`. Later positions do not reach it.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import cases
import torch
from safetensors.torch import load_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

Model = TypeVar("Model", bound=Eagle3DraftModel)
LAYERS = [2, 4, 5]
SHAPE = {
    "vocab_size": cases.VOCAB,
    "hidden_size": cases.HIDDEN,
    "intermediate_size": cases.INTERMEDIATE,
    "num_attention_heads": cases.HEADS,
    "num_key_value_heads": cases.KV_HEADS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
PLAIN = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def record(name: str, seed: int, layer: PretrainedConfig, draft_vocab: int, layers: list[int], **flags: bool) -> None:
    """Write the case `name`; `flags` are fields of `Eagle3SpeculatorConfig`."""
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=layers,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=cases.STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="example/target", architectures=["LlamaForCausalLM"]),
        ),
        **{**PLAIN, **flags},
    )
    model = filled(Eagle3DraftModel(config), seed)
    written, weights = saved(model)
    tokens, features = cases.inputs(seed, len(layers) * cases.HIDDEN)
    cases.write(name, written, weights, {"tokens": tokens, "features": features, **outputs(model, tokens, features)})


def filled(model: Model, seed: int) -> Model:
    """Fill weights and vocabulary of a head; return it in evaluation mode."""
    cases.fill(model, seed)
    draft_vocab = model.config.draft_vocab_size
    if draft_vocab < cases.VOCAB:
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(1, 1000, (cases.VOCAB,), generator=generator)
        d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts.tolist())), draft_vocab, cases.VOCAB)
        model.load_vocab_mappings(t2d, d2t)
    return model.eval()


def saved(model: Eagle3DraftModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return configuration and bfloat16 weights that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        return cases.read_config(Path(folder)), load_file(Path(folder) / "model.safetensors")


def outputs(model: Eagle3DraftModel, tokens: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Run the forward once for each drafted token and return the tensors of the last run."""
    drafted = tokens[1:].tolist()
    padded = torch.cat([features, torch.zeros(cases.STEPS, features.shape[1])])
    for step in range(cases.STEPS + 1):
        seen = run(model, torch.tensor(drafted + [0] * (cases.STEPS - step)), padded)
        drafted.append(int(cases.greedy(seen["logits"][step][cases.PAIRS - 1], model.d2t)))
    last = cases.PAIRS - 1
    return {
        "positions": seen["positions"][0][: cases.PAIRS],
        "pairs.projected": seen["projected"][0][: cases.PAIRS],
        "pairs.hidden": seen["hidden"][0][: cases.PAIRS],
        "pairs.normed": seen["normed"][0][: cases.PAIRS],
        "pairs.logits": seen["logits"][0][: cases.PAIRS],
        "chain.tokens": torch.tensor(drafted[cases.PAIRS :]),
        "chain.positions": torch.stack([at[last] for at in seen["positions"][1:]]),
        "chain.fed": torch.stack([fed[last] for fed in seen["fed"][1:]]),
        "chain.hidden": torch.stack([hidden[last] for hidden in seen["hidden"][1:]]),
        "chain.logits": torch.stack([logits[last] for logits in seen["logits"][1:]]),
    }


def run(model: Eagle3DraftModel, input_ids: Tensor, features: Tensor) -> dict[str, list[Tensor]]:
    """Inputs and outputs of the modules at every unrolled step, without the batch axis."""
    seen: dict[str, list[Tensor]] = {
        name: [] for name in ("positions", "projected", "fed", "hidden", "normed", "logits")
    }
    hooks = [
        model.rotary_emb.register_forward_pre_hook(lambda _, args: seen["positions"].append(args[1][0])),
        model.fc.register_forward_hook(lambda _, __, out: seen["projected"].append(out[0])),
        model.layers[0].register_forward_pre_hook(lambda _, args: seen["fed"].append(args[0][0, :, cases.HIDDEN :])),
        model.layers[-1].register_forward_hook(lambda _, __, out: seen["hidden"].append(out[0])),
        model.norm.register_forward_hook(lambda _, __, out: seen["normed"].append(out[0])),
        model.lm_head.register_forward_hook(lambda _, __, out: seen["logits"].append(out[0])),
    ]
    with torch.no_grad():
        model(
            hidden_states=features[None],
            input_ids=input_ids[None],
            document_ids=torch.zeros(1, len(input_ids), dtype=torch.long),
            ttt_steps=cases.STEPS + 1,
        )
    for hook in hooks:
        hook.remove()
    return seen


if __name__ == "__main__":
    llama = LlamaConfig(**SHAPE, rms_norm_eps=1e-5, rope_theta=10000.0, pad_token_id=0)
    wide = LlamaConfig(**SHAPE, head_dim=12, rope_theta=500000.0, num_hidden_layers=1)
    qwen3 = Qwen3Config(**SHAPE, head_dim=16, rope_theta=1000000.0, num_hidden_layers=2)
    llama.num_hidden_layers = 1
    record("eagle3_speculators", 2, llama, cases.DRAFT_VOCAB, LAYERS)
    record("eagle3_speculators_residual", 4, llama, cases.DRAFT_VOCAB, LAYERS, norm_before_residual=True)
    record("eagle3_speculators_3_1", 14, wide, cases.DRAFT_VOCAB, LAYERS, norm_before_fc=True, norm_output=True)
    record("eagle3_speculators_fc_norm", 5, llama, cases.DRAFT_VOCAB, [1, 3], fc_norm=True, norm_output=True)
    record("eagle3_speculators_qwen3", 5, qwen3, cases.VOCAB, LAYERS, norm_before_residual=True)
