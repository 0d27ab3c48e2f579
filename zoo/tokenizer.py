"""Trains the zoo's byte-level BPE tokenizers: every word of the world is one token, any other text becomes bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


def train_tokenizer(
    texts: Iterable[str],
    specials: Sequence[str | AddedToken],
    layout: str = "$A",
    vocab_size: int = 2048,
    lowercase: bool = False,
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer; `layout` places a special token beside the text `$A`, `settings` are transformers'."""
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
