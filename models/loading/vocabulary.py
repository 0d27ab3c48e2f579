"""Reduce a drafter's output layer to a draft vocabulary, and read and write the file that lists its tokens.

An output layer over a large vocabulary costs a small drafter as much as its layers, and texts use few of the tokens
(Zhao et al. 2025, FR-Spec, arXiv 2502.14856). A token outside the list is never drafted; the target can still generate
it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from files.installation import command
from files.local import read_regular
from files.strict_json import parse_json

MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_FILE_VALUES = 16_000_000


class VocabularyError(ValueError):
    """Raised if a token list is missing, broken or of another tokenizer; the message names it."""


@dataclass(frozen=True)
class TokenCount:
    """A token id, its string in the tokenizer's vocabulary, and its number of occurrences."""

    token_id: int
    token: str
    count: int


class SlicedHead(nn.Module):
    """Output layer over `token_ids`; all other tokens of `vocab_size` get logits of −inf.

    `rows` computes the logits of `token_ids`; a backend may replace it by a faster layer with the same weights.
    """

    def __init__(self, rows: nn.Module, token_ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.rows = rows
        self.vocab_size = vocab_size
        self.token_ids: Tensor
        self.register_buffer("token_ids", token_ids, persistent=False)

    @staticmethod
    def of(head: nn.Linear, token_ids: Iterable[int], vocab_size: int) -> SlicedHead:
        """Create a sliced head from copies of the rows `token_ids` of `head`."""
        ids = torch.tensor(sorted(set(token_ids)), dtype=torch.long, device=head.weight.device)
        assert len(ids), "no tokens"
        assert 0 <= int(ids[0]) <= int(ids[-1]) < min(vocab_size, head.weight.shape[0]), ids
        return SlicedHead(_some_rows(head, ids), ids, vocab_size)

    @staticmethod
    def over(rows: nn.Linear, token_ids: Tensor, vocab_size: int) -> nn.Module:
        """Return an output layer for a target with `vocab_size` tokens, where row i of `rows` has token `token_ids[i]`.

        Rows of tokens that the target does not have, such as padding of the vocabulary, are left out. Returns `rows`
        itself if it has all tokens in order.
        """
        if token_ids.tolist() == list(range(vocab_size)):
            return rows
        indices = torch.nonzero(token_ids < vocab_size).flatten()
        some = rows if len(indices) == len(token_ids) else _some_rows(rows, indices)
        return SlicedHead(some, token_ids[indices], vocab_size)

    def with_rows(self, rows: nn.Module) -> SlicedHead:
        """Return the same slice with another layer for its logits, which has equal weights."""
        return SlicedHead(rows, self.token_ids, self.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits (…, V) in fp32 of hidden states (…, D)."""
        few: Tensor = self.rows(hidden).float()
        out = few.new_full((*few.shape[:-1], self.vocab_size), -torch.inf)
        return out.index_copy_(-1, self.token_ids, few)


def _some_rows(head: nn.Linear, indices: Tensor) -> nn.Linear:
    """Return a linear layer with copies of the rows `indices` of `head`."""
    rows = nn.Linear(head.in_features, len(indices), bias=head.bias is not None, device="meta")
    rows.weight = nn.Parameter(head.weight.detach()[indices], requires_grad=False)
    if head.bias is not None:
        rows.bias = nn.Parameter(head.bias.detach()[indices], requires_grad=False)
    return rows


def write_tokens(path: Path, tokens: Sequence[TokenCount], texts_of: str) -> None:
    """Write a token list, most frequent token first; `texts_of` describes the counted texts."""
    rows = ",\n".join(json.dumps([entry.token_id, entry.token, entry.count]) for entry in _by_count(tokens))
    part = path.with_name(path.name + ".part")
    part.write_text(f'{{"counted": {json.dumps(texts_of)},\n"tokens": [\n{rows}\n]}}\n', encoding="utf-8")
    part.replace(path)


def _writer() -> str:
    return shlex.join(command("vocabulary"))


def read_tokens(path: str) -> list[TokenCount]:
    """Read a token list, most frequent token first; raises VocabularyError for files that are none."""
    try:
        content = parse_json(read_regular(path, MAX_FILE_BYTES), MAX_FILE_VALUES)
    except OSError as error:
        raise VocabularyError(f"{path}: it cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise VocabularyError(f"{path}: it is no JSON, so not what {_writer()} writes") from None
    rows = content.get("tokens") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise VocabularyError(f"{path}: it holds no tokens; {_writer()} writes such files")
    tokens = []
    for number, row in enumerate(rows):
        match row:
            case [int(token_id), str(token), int(count)] if token_id >= 0 and count >= 0:
                tokens.append(TokenCount(token_id, token, count))
            case _:
                raise VocabularyError(f"{path}: tokens[{number}] is {json.dumps(row)[:80]}, not [id, token, count]")
    if len({entry.token_id for entry in tokens}) < len(tokens):
        raise VocabularyError(f"{path}: it names a token id twice")
    return _by_count(tokens)


def _by_count(tokens: Iterable[TokenCount]) -> list[TokenCount]:
    return sorted(tokens, key=lambda entry: (-entry.count, entry.token_id))
