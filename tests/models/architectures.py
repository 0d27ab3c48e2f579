"""Every text architecture of transformers that can be made tiny, and what the engine makes of each.

python -m tests.models.architectures [NAME ...]    # prints a line for each; 1 if an accepted one differs

Architectures with windows are tried with windows that are shorter than the longest prompt, too.
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from models.loading.checkpoints import CheckpointError, attention_of
from models.target import Target
from tests import toys

NUM_TOKENS = 12
LENGTHS = (3, 9, 14, 60)
WINDOW = 40
WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size", "index_topk", "floor_scale")
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), toys.VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "moe_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_layers", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "encoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length"), 512),
    **{"head_dim": 8, "rotary_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True},
    **{"decoder_start_token_id": 1, "tie_word_embeddings": False, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
}


def make(kind: str, **changes: Any) -> nn.Module:
    """A tiny random model of an architecture; raises what its classes raise where it cannot be made so."""
    default = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    config = AutoConfig.for_model(kind, **{**sizes, **changes})
    options: dict[str, Any] = {"attn_implementation": attention_of(config), "dtype": torch.float32}
    with torch.device("meta"):
        outline: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    if sum(parameter.numel() for parameter in outline.parameters()) > 3_000_000:
        raise ValueError("it does not become tiny")
    model: nn.Module = AutoModelForCausalLM.from_config(config, **options).eval()
    toys.randomise(model, 0)
    return model


def generated(model: Any, ids: torch.Tensor) -> list[int]:
    """The tokens of transformers' own greedy `generate`, without the prompt."""
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=2
    )
    return [int(token) for token in out[0, ids.shape[1] :]]


def outcome(kind: str, **changes: Any) -> str:
    """`refused: reason`, `equal`, or `DIFFERENT: tokens`; of engine and `generate` over ragged prompts, with drafts."""
    model, same, third = (make(kind, **changes) for _ in range(3))
    prompts = [" ".join(["<s>", *(f"w{5 + (7 * i + 11 * length) % 40}" for i in range(length))]) for length in LENGTHS]
    front_end = toys.front_end("llama")
    wanted = []
    for text in prompts:
        wanted.append(generated(same, front_end.encode(text, ())["input_ids"]))
    try:
        target = Target(model, front_end, kind)
    except CheckpointError as error:
        return f"refused: {str(error).removeprefix(kind + ': ')}"
    drafter = ModelDrafter(Target(third, front_end, kind), [Full()], toys.VOCAB_SIZE)
    engine = Engine(target, Method(drafter, Chain(3), Exact()), 2, 96)
    requests = [Request(str(n), text, (), Sampling(max_new_tokens=NUM_TOKENS)) for n, text in enumerate(prompts)]
    done = {int(completion.sample_id): list(completion.token_ids) for completion in engine.run(requests)}
    got = [done[number] for number in range(len(prompts))]
    return "equal" if got == wanted else f"DIFFERENT: {got} for {wanted}"


def main(names: list[str]) -> int:
    """Print what becomes of each architecture; 1 if an accepted one gives other tokens."""
    wrong = 0
    for kind in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for changes in variants(kind):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    outcome_text = outcome(kind, **changes)
            except Exception as error:  # not made tiny, or not generated from, by its own code
                outcome_text = f"not made: {type(error).__name__}: {(str(error) or ' ').splitlines()[0][:80]}"
            wrong += outcome_text.startswith("DIFFERENT")
            print(f"{kind:28} {' '.join(changes):40} {outcome_text}", flush=True)
    return int(wrong > 0)


def variants(kind: str) -> list[dict[str, Any]]:
    """The changes of an architecture to try: none, short windows, and short windows without layers that name them."""
    default = AutoConfig.for_model(kind)
    windows: dict[str, Any] = {name: WINDOW for name in WINDOWS if hasattr(default, name)}
    full = {"layer_types": ["full_attention"] * 2} if getattr(default, "layer_types", None) else {}
    return [{}, *([windows] if windows else []), *([windows | full] if full else [])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
