"""Selects the token ids of the draft vocabulary, and slices the output layers of heads and models to them."""

from __future__ import annotations

import copy
import hashlib
from functools import lru_cache

from torch import nn

from configs.drafters import DraftVocabularyConfig
from configs.load import ConfigError
from models.contract import TargetModel
from models.heads.medusa import MedusaHeads
from models.inputs.processing import FrontEnd
from models.loading.output_layer import OutputLayer
from models.loading.vocabulary import SlicedHead, TokenCount, VocabularyError, read_tokens

NUM_NAMED_DIFFERENCES = 3


def check_vocabulary(choice: DraftVocabularyConfig, where: str, front_end: FrontEnd) -> str | None:
    """Return a hash of a token list's ids, None without a list; raise ConfigError if it does not fit the tokenizer."""
    if choice.path is None:
        return None
    try:
        tokens = _tokens(choice.path)[: choice.size]
    except VocabularyError as error:
        raise ConfigError(f"{where}.path: {error}") from None
    known = {number: token for token, number in front_end.tokenizer.get_vocab().items()}
    wrong = [
        f"{entry.token_id} is {entry.token!r} there and {known.get(entry.token_id)!r} for the target"
        for entry in tokens
        if known.get(entry.token_id) != entry.token
    ]
    if wrong:
        raise ConfigError(
            f"{where}.path: {choice.path} was counted with another tokenizer: {len(wrong)} ids differ, e.g. id "
            + "; ".join(wrong[:NUM_NAMED_DIFFERENCES])
        )
    return hashlib.sha256(" ".join(str(entry.token_id) for entry in tokens).encode()).hexdigest()[:16]


def drafted_ids(choice: DraftVocabularyConfig, target: TargetModel, num_rows: int) -> list[int]:
    """Return the draft vocabulary's ids below `num_rows`, sorted, EOS ids included; raise ConfigError without any."""
    most = min(num_rows, target.vocab_size)
    if choice.path is not None:
        chosen = [entry.token_id for entry in _tokens(choice.path)[: choice.size]]
    else:
        assert choice.size is not None, "the schema asks for a path or a size"
        chosen = list(range(min(choice.size, most)))
    token_ids = sorted(number for number in {*chosen, *target.eos_ids} if number < most)
    if not token_ids:
        raise ConfigError(f"method.drafter.vocabulary: the drafter has {num_rows} tokens, and none of the chosen ones")
    return token_ids


def slice_model(model: TargetModel, choice: DraftVocabularyConfig | None, target: TargetModel) -> TargetModel:
    """Return a copy of the model whose output layer has only the rows of the draft vocabulary."""
    if choice is None:
        return model
    sliced = copy.copy(model)
    sliced.head = slice_head(model.head, choice, target)
    return sliced


def slice_head(head: nn.Module, choice: DraftVocabularyConfig | None, target: TargetModel) -> nn.Module:
    """Slice an output layer to the draft vocabulary; logits have the target's width. Return `head` without a choice."""
    if choice is None:
        return head
    if isinstance(head, OutputLayer):
        # Tokens outside the draft vocabulary have no logit that a cap could raise.
        inner = slice_head(head.rows, choice, target)
        assert isinstance(inner, SlicedHead)
        return inner.with_rows(head.with_rows(inner.rows))
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"method.drafter.vocabulary: the drafter's output layer is a {type(head).__name__}, which cannot be "
            "sliced; leave it out"
        )
    return SlicedHead.of(head, drafted_ids(choice, target, head.weight.shape[0]), target.vocab_size)


def slice_medusa(heads: MedusaHeads, choice: DraftVocabularyConfig | None, target: TargetModel) -> MedusaHeads:
    """Return Medusa heads whose output layers have only the rows of the draft vocabulary."""
    if choice is None:
        return heads
    return heads.with_outputs([slice_head(list(head.children())[-1], choice, target) for head in heads])


@lru_cache(maxsize=8)
def _tokens(path: str) -> tuple[TokenCount, ...]:
    """Read a token list; the result is cached, so that a rebuilt engine has the same list."""
    return tuple(read_tokens(path))
