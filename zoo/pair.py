"""Builds the tokenizer, the processor and the untrained models of the caption pair, and saves them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from zoo.world import dialogue, grammar
from zoo.world.scene import change_scene, draw_clip, draw_scene, scene_rng

CHECKPOINTS = Path(__file__).parent / "checkpoints"
IMAGE_PX, PATCH_PX = 96, 16
NUM_VISUAL_TOKENS = (IMAGE_PX // PATCH_PX) ** 2
MAX_POSITIONS = 2048
SPECIALS = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>", "image": "<image>"}

# LLaVA-1.5's turns: images first, then text; an answer ends in eos. A message's content may be a plain string.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] != 'system' %}{{ m['role'].upper() + ':' }}{% endif %}"
    "{% if m['content'] is string %}{{ ' ' + m['content'] + (eos_token if m['role'] == 'assistant' else ' ') }}"
    "{% else %}{{ ' ' }}"
    "{% for c in m['content'] if c['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}"
    "{{ eos_token if m['role'] == 'assistant' else ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# Per model: width, attention heads and layers of the language model, its feed-forward width; width and layers of the
# vision tower. Heads of the language model are 64 wide in both.
ARCHITECTURES = {
    "target": {"hidden": 256, "heads": 4, "layers": 3, "ffn": 512, "vision": 128, "vision_layers": 4},
    "drafter": {"hidden": 64, "heads": 1, "layers": 2, "ffn": 192, "vision": 64, "vision_layers": 3},
    "captioner": {"hidden": 128, "heads": 2, "layers": 2, "ffn": 256, "vision": 64, "vision_layers": 3},
}


def train_tokenizer(
    texts: Iterable[str],
    specials: Sequence[str | AddedToken],
    layout: str = "$A",
    vocab_size: int = 2048,
    lowercase: bool = False,
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: every word of the world is one token, any other text becomes bytes.

    `layout` places a special token beside the text `$A`; `settings` are transformers'.
    """
    core = Tokenizer(models.BPE())
    if lowercase:
        core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=lowercase)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    placed = [(word, core.token_to_id(word)) for word in layout.split() if word != "$A"]
    if placed:
        pair = f"{layout} {layout.replace('$A', '$B')}"
        core.post_processor = processors.TemplateProcessing(single=layout, pair=pair, special_tokens=placed)
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **settings)


def grammar_texts(num_scenes: int, seed: int) -> list[str]:
    """Return texts in which every word of the grammar, of the dialogues and of the prompts occurs."""
    texts = list(grammar.PROMPTS.values()) + list(dialogue.SECOND_PROMPTS.values())
    texts += [dialogue.CHANGE_PROMPT, dialogue.CLIP_PROMPT, "USER: ", "ASSISTANT: "]
    texts += [f" {word}" for words in grammar.FILLERS.values() for word in words]
    for index in range(num_scenes):
        rng = scene_rng("train", seed, index)
        scene = draw_scene(rng, "train")
        texts += [grammar.write_caption(scene, phrasing, rng) for phrasing in grammar.PROMPTS]
        texts += [dialogue.write_second(scene, question) for question in dialogue.SECOND_PROMPTS]
        after, kind, changed = change_scene(rng, scene, "train")
        texts.append(dialogue.write_change(scene, after, kind, changed, rng))
        texts.append(dialogue.write_clip(draw_clip(rng, "train", 3), rng))
        texts += list(dialogue.draw_text_only(rng))
    # A prompt follows a line break, an answer follows a space: the tokenizer is trained on both forms.
    return texts + [f" {text}" for text in texts if not text.startswith(" ")]


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer of the models `caption_*` (target, drafter, captioner) on captions drawn with `seed`."""
    tokens: dict[str, Any] = {f"{name}_token": SPECIALS[name] for name in ("unk", "bos", "eos", "pad")}
    return train_tokenizer(
        grammar_texts(800, seed),
        list(SPECIALS.values()),
        layout="<s> $A",
        **tokens,
        extra_special_tokens={"image_token": SPECIALS["image"]},
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def build_processor(
    tokenizer: PreTrainedTokenizerFast, image_px: int = IMAGE_PX, patch_px: int = PATCH_PX
) -> LlavaProcessor:
    """Build a processor: CLIP's preprocessing to `image_px` on PIL, one image token per patch.

    By default it is that of the models `caption_*`: 96 px, 36 image tokens.
    """
    size = {"height": image_px, "width": image_px}
    images = CLIPImageProcessorPil(size=size, crop_size=size, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch_px,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )


def language_fields(
    shape: Mapping[str, int], tokenizer: PreTrainedTokenizerFast, max_positions: int = MAX_POSITIONS
) -> dict[str, Any]:
    """Return the config of a language model of a shape; its heads are 64 wide."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape.get("kv_heads", shape["heads"]),
        "head_dim": 64,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        **special_ids(tokenizer),
    }


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """Return the ids of the special tokens by the names that configs use."""
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def seed_weights(name: str, seed: int) -> None:
    """Seed the random weights of one model; every model has a different stream."""
    torch.manual_seed(random.Random(f"{name}/{seed}").getrandbits(62))


def build_model(role: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """Build the untrained `target`, `drafter` or `captioner`, its weights drawn from a seed."""
    shape = ARCHITECTURES[role]
    vision = CLIPVisionConfig(
        hidden_size=shape["vision"],
        intermediate_size=2 * shape["vision"],
        num_hidden_layers=shape["vision_layers"],
        num_attention_heads=shape["vision"] // 32,
        image_size=IMAGE_PX,
        patch_size=PATCH_PX,
        projection_dim=shape["vision"],
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**language_fields(shape, tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids(SPECIALS["image"]),
        image_seq_length=NUM_VISUAL_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    seed_weights(role, seed)
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**special_ids(tokenizer), do_sample=False)
    return model


def save_model(model: PreTrainedModel, processor: LlavaProcessor | PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model in bfloat16 with its processor; the Auto classes load the folder like any checkpoint."""
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
