"""Record DFlash of the `speculators` package: `python record_dflash_speculators.py` (package installed).

`DFlashDraftModel._backbone_forward` computes two blocks at once, one for each anchor that the loss mask selects. The
anchor is the last token of a round; its block sees the features of the tokens before it.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import cases
import torch
from safetensors.torch import load_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import Qwen3Config

BLOCK, MASK, ROUND = 5, 63, 3
LAYERS = [2, 4, 5]


def record(name: str, seed: int, draft_vocab: int, layer_types: list[str], **fields: bool) -> None:
    """Write the case `name`; `fields` are fields of `DFlashSpeculatorConfig`."""
    layer = Qwen3Config(
        vocab_size=cases.VOCAB,
        hidden_size=cases.HIDDEN,
        intermediate_size=cases.INTERMEDIATE,
        num_hidden_layers=len(layer_types),
        num_attention_heads=cases.HEADS,
        num_key_value_heads=cases.KV_HEADS,
        head_dim=16,
        rope_theta=1000000.0,
        max_position_embeddings=256,
        use_sliding_window="sliding_attention" in layer_types,
        sliding_window=4,
        layer_types=layer_types,
        tie_word_embeddings=False,
    )
    layer._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=LAYERS,
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="example/target", architectures=["Qwen3ForCausalLM"]),
        ),
        **fields,
    )
    model = DFlashDraftModel(config).eval()
    cases.fill(model, seed)
    if draft_vocab < cases.VOCAB:
        d2t, t2d = cases.draft_vocabulary(seed)
        model.load_vocab_mappings(t2d, d2t)
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        written = cases.read_config(Path(folder))
        weights = load_file(Path(folder) / "model.safetensors")
    tokens, features = cases.inputs(seed, model.fc.in_features, cases.PAIRS + ROUND)
    recorded = {"tokens": tokens, "features": features, **outputs(model, tokens, features)}
    if "embed_tokens.weight" not in weights:
        recorded["target.embed_tokens"] = model.embed_tokens.weight
    if "lm_head.weight" not in weights:
        recorded["target.lm_head"] = model.lm_head.weight
    cases.write(name, written, weights, recorded)


def outputs(model: DFlashDraftModel, tokens: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Both blocks. The sequence is padded, because the last positions cannot be anchors."""
    anchors = [cases.PAIRS, cases.PAIRS + ROUND]
    total = len(tokens) + BLOCK
    padded = torch.cat([features, torch.zeros(total - len(features), features.shape[1])])
    mask = torch.zeros(1, total)
    mask[0, anchors] = 1
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            hidden_states=padded[None],
            input_ids=torch.cat([tokens, tokens.new_zeros(BLOCK)])[None],
            loss_mask=mask,
            verifier_last_hidden_states=torch.zeros(1, total, cases.HIDDEN),
            document_ids=torch.zeros(1, total, dtype=torch.long),
            max_anchors=len(anchors),
        )
        found = {"context.projected": model.hidden_norm(model.fc(features))}
    for prefix, anchor, rows, scores in zip(
        ("first", "second"), anchors, hidden[0].split(BLOCK), logits[0].split(BLOCK), strict=True
    ):
        drafted = [cases.greedy(row, model.d2t) for row in scores[1:]]
        found |= {
            f"{prefix}.ids": torch.cat([tokens[anchor : anchor + 1], torch.full((BLOCK - 1,), MASK)]),
            f"{prefix}.positions": torch.arange(anchor + BLOCK),
            f"{prefix}.hidden": rows,
            f"{prefix}.logits": scores[1:],
            f"{prefix}.tokens": torch.stack(drafted),
        }
    return found


if __name__ == "__main__":
    full, sliding = "full_attention", "sliding_attention"
    record("dflash_speculators", 59, cases.DRAFT_VOCAB, [full, full])
    record("dflash_speculators_sliding", 72, cases.VOCAB, [sliding, full])
