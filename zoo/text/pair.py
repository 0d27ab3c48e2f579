"""Builds the tokenizer and the two untrained models of the text pair, and saves them.

Both are `LlamaForCausalLM`, which transformers and vLLM also run, for comparisons.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zoo import pair
from zoo.pair import MAX_POSITIONS, language_fields, seed_weights, special_ids, train_tokenizer
from zoo.world import listing
from zoo.world.grammar import FILLERS
from zoo.world.scene import scene_rng

SPECIALS = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}

# Vicuna's turns; an answer ends in eos. A message's content is a plain string.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{{ m['content'] + (eos_token if m['role'] == 'assistant' else ' ') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# Width, heads (64 wide each), layers and feed-forward width.
ARCHITECTURES = {
    "target": {"hidden": 256, "heads": 4, "layers": 3, "ffn": 512},
    "drafter": {"hidden": 64, "heads": 1, "layers": 2, "ffn": 192},
}


def render(prompt: str) -> str:
    """Render one question by the chat template."""
    return f"{SPECIALS['bos']}USER: {prompt} ASSISTANT:"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer of both models."""
    texts = [f" {word}" for words in FILLERS.values() for word in words]
    for index in range(800):
        rng = scene_rng("train", 0, index)
        scene = listing.draw_listed_scene(rng, "train")
        for phrasing in listing.ASKED:
            answer = listing.write_answer(scene, phrasing, rng)
            texts.append(f"{render(listing.write_prompt(scene, phrasing)).removeprefix(SPECIALS['bos'])} {answer}")
    tokens: dict[str, Any] = {f"{name}_token": word for name, word in SPECIALS.items()}
    return train_tokenizer(
        texts,
        list(SPECIALS.values()),
        layout="<s> $A",
        **tokens,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def build_model(role: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Build the untrained `target` or `drafter`, its weights drawn from a seed."""
    seed_weights(f"text-{role}", seed)
    model = LlamaForCausalLM(LlamaConfig(**language_fields(ARCHITECTURES[role], tokenizer)))
    model.generation_config = GenerationConfig(**special_ids(tokenizer), do_sample=False)
    return model


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model as `zoo.pair.save_model`, with the name of a tokenizer class that other engines can load too."""
    pair.save_model(model, tokenizer, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")
