"""The tokenizer and the two untrained models of the text pair, and their files.

Both are `LlamaForCausalLM`, which every engine can run, for comparisons.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zoo.world import listing
from zoo.world.grammar import FILLERS
from zoo.world.scene import scene_rng

MAX_POSITIONS = 2048
SPECIALS = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}

# Vicuna's turns; an answer ends in eos. A message's content is a plain string.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{{ m['content'] + (eos_token if m['role'] == 'assistant' else ' ') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# Width, heads (64 wide each), layers and feed-forward width.
ARCHITECTURES = {
    "target": {"hidden": 256, "heads": 4, "layers": 3, "ffn": 512},
    "drafter": {"hidden": 64, "heads": 1, "layers": 2, "ffn": 192},
}


def render(prompt: str) -> str:
    """What the chat template makes of one question, without the bos that the tokenizer adds."""
    return f"USER: {prompt} ASSISTANT:"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer: every word of the world is one token, any other text falls into bytes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = [f" {word}" for words in FILLERS.values() for word in words]
    for index in range(800):
        rng = scene_rng("train", 0, index)
        scene = listing.draw_listed_scene(rng, "train")
        for phrasing in listing.ASKED:
            answer = listing.write_answer(scene, phrasing, rng)
            texts.append(f"{render(listing.write_prompt(scene, phrasing))} {answer}")
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=list(SPECIALS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    bos = SPECIALS["bos"]
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, core.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=SPECIALS["unk"],
        bos_token=bos,
        eos_token=SPECIALS["eos"],
        pad_token=SPECIALS["pad"],
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(role: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Build the untrained `target` or `drafter`, its weights drawn from a seed."""
    shape = ARCHITECTURES[role]
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        **ids,
    )
    torch.manual_seed(random.Random(f"text-{role}/{seed}").getrandbits(62))
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    return model


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model, turned into bfloat16, with its tokenizer; the Auto classes load the folder like any checkpoint."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The class by the name that every release of transformers knows, and other engines with it.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")
