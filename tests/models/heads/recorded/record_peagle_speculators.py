"""Record P-EAGLE of the `speculators` package: `python record_peagle_speculators.py` (package installed).

`PEagleDraftModel.forward` computes everything. It draws which positions are predicted at which depth; seeds are tried
until all depths of the last pair are drawn. Hooks read the inputs and outputs of its modules.
"""

from __future__ import annotations

import cases
import speculators.models.peagle.core as core
import torch
from record_eagle3_speculators import LAYERS, PLAIN, SHAPE, filled, saved
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

MASK = 5
DEPTHS = cases.STEPS + 1
SPARE = 3
"""Positions after the last depth, so that the drawing rarely lacks one."""


def record(name: str, seed: int, layer: PretrainedConfig, draft_vocab: int, **flags: bool) -> None:
    """Write the case `name`; `flags` are fields of `PEagleSpeculatorConfig`."""
    layer._attn_implementation = "eager"
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="example/target", architectures=["LlamaForCausalLM"]),
        ),
        **{**PLAIN, **flags},
    )
    model = filled(PEagleDraftModel(config), seed)
    with torch.no_grad():
        # Features of a mask are as large as those of tokens.
        model.mask_hidden.copy_((model.mask_hidden * model.mask_hidden.shape[-1] ** 0.5).to(torch.bfloat16))
    written, weights = saved(model)
    tokens, features = cases.inputs(seed, len(LAYERS) * cases.HIDDEN)
    cases.write(name, written, weights, {"tokens": tokens, "features": features, **outputs(model, tokens, features)})


def outputs(model: PEagleDraftModel, tokens: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Run the forward until all depths of the last pair are drawn; return its tensors of all pairs and depths."""
    length, last = cases.PAIRS + DEPTHS + SPARE, cases.PAIRS - 1
    ids = torch.cat([tokens[1:], torch.zeros(length - cases.PAIRS, dtype=torch.long)])
    padded = torch.cat([features, torch.zeros(length - cases.PAIRS, features.shape[1])])
    for seed in range(10_000):
        torch.manual_seed(seed)
        anchors, depths, seen = run(model, ids, padded)
        rows = [torch.nonzero((anchors == last) & (depths == depth)).flatten() for depth in range(DEPTHS)]
        if all(len(row) == 1 for row in rows):
            break
    else:
        raise ValueError("no seed draws all depths of the last pair")
    chain, pairs = torch.cat(rows), torch.arange(cases.PAIRS)  # depth 0 comes first, in order
    return {
        "positions": seen["positions"][pairs],
        "pairs.projected": seen["projected"][pairs],
        "pairs.hidden": seen["hidden"][pairs],
        "pairs.normed": seen["normed"][pairs],
        "pairs.logits": seen["logits"][pairs],
        "chain.tokens": torch.stack([cases.greedy(seen["logits"][row], model.d2t) for row in chain]),
        "levels.positions": seen["positions"][chain],
        "levels.hidden": seen["hidden"][chain],
        "levels.logits": seen["logits"][chain],
    }


def run(model: PEagleDraftModel, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return anchor and depth of every row of one forward, and inputs and outputs of the modules."""
    seen: dict[str, Tensor] = {}
    drawn: list[tuple[Tensor, Tensor]] = []
    draw = core.generate_cod_sample_indices

    def watched(**given: object) -> tuple[Tensor, Tensor]:
        drawn.append(draw(**given))
        return drawn[-1]

    hooks = [
        model.rotary_emb.register_forward_pre_hook(lambda _, args: seen.update(positions=args[1][0])),
        model.fc.register_forward_hook(lambda _, __, out: seen.update(projected=out[0])),
        model.layers[-1].register_forward_hook(lambda _, __, out: seen.update(hidden=out[0])),
        model.norm.register_forward_hook(lambda _, __, out: seen.update(normed=out[0])),
        model.lm_head.register_forward_hook(lambda _, __, out: seen.update(logits=out[0])),
    ]
    core.generate_cod_sample_indices = watched
    try:
        with torch.no_grad():
            model(
                hidden_states=features[None],
                input_ids=ids[None],
                document_ids=torch.zeros(1, len(ids), dtype=torch.long),
                verifier_last_hidden_states=torch.zeros(1, len(ids), cases.HIDDEN),
                loss_config=resolve_loss_config("kl_div", "eager"),
                num_depths=DEPTHS,
                down_sample_ratio=1.0,
                down_sample_ratio_min=1.0,
            )
    finally:
        core.generate_cod_sample_indices = draw
        for hook in hooks:
            hook.remove()
    return *drawn[0], seen


if __name__ == "__main__":
    llama = LlamaConfig(**SHAPE, num_hidden_layers=2, rms_norm_eps=1e-5, rope_theta=10000.0, pad_token_id=0)
    qwen3 = Qwen3Config(**SHAPE, head_dim=16, rope_theta=1000000.0, num_hidden_layers=2)
    record("peagle_speculators", 10, llama, cases.DRAFT_VOCAB)
    record("peagle_speculators_qwen3", 16, qwen3, cases.VOCAB, norm_before_residual=True, norm_before_fc=True)
