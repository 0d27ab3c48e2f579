"""Compiles JSON schemas, regular expressions and choices to grammars, and follows a grammar along a request's tokens.

The library is llguidance; see docs/design/decisions/36-grammar-library.md. A mask depends only on the tokens before it:
rolling back and following the same tokens again gives the same mask.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray

MAX_SOURCE_BYTES = 1 << 20
"""Maximum number of bytes of a schema, an expression or all choices together."""
LIMITS = LLParserLimits(max_grammar_size=200_000, max_lexer_states=50_000, verbose_errors=False)
"""Bounds of compilation and of one mask; a lexer state takes 1 to 2 kB."""
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""JSON is written on one line, as by `json.dumps`; unsupported keywords of a schema are errors."""
MAX_MASK_S = 0.5
"""Maximum number of CPU seconds of a grammar's first mask; usual grammars take about a millisecond."""
NO_TOKEN = -1


class GrammarError(ValueError):
    """Raised if a grammar or a tokenizer cannot be used; the message is the reason."""


def schema_source(schema: dict[str, Any]) -> str:
    """Return the grammar source of JSON values that a JSON schema describes."""
    # As text, in which numbers that restrict nothing, such as a default, may have any size.
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SEPARATORS)  # type: ignore[arg-type]


def regex_source(regex: str) -> str:
    """Return the grammar source of texts that match a regular expression (syntax of Rust's `regex`) as a whole."""
    return LLMatcher.grammar_from_regex(regex)


def choices_source(choices: Sequence[str]) -> str:
    """Return the grammar source of a list of texts."""
    # A terminal: alternatives of rules would be limited by the parser's items.
    words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}")


class Vocabulary:
    """The tokens of a target: the bytes of each, and the EOS tokens; `vocab_size` is the width V of its logits.

    Raises:
        GrammarError: the tokenizer is not backed by the library `tokenizers`, or there is no EOS token.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        if not eos_ids:
            raise GrammarError("the target has no EOS token, so no text could end")
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.num_words = -(-vocab_size // 32)
        try:
            self.tokens: LLTokenizer = from_tokenizer(tokenizer, vocab_size, sorted(eos_ids))
        except Exception as error:  # the library raises several types, for tokenizers of unknown make
            raise GrammarError(f"the target's tokenizer cannot be read: {error}") from error
        eos = np.zeros(self.num_words * 32, dtype=np.uint8)
        eos[sorted(eos_ids)] = 1
        self.eos_words: NDArray[np.uint8] = np.packbits(eos, bitorder="little")


class Grammar:
    """A compiled grammar; requests with the same grammar share its lexer.

    Raises:
        GrammarError: the source is invalid, too large or uses features that the library lacks.
    """

    def __init__(self, source: str, vocabulary: Vocabulary) -> None:
        if len(source.encode()) > MAX_SOURCE_BYTES:
            raise GrammarError(f"it has {len(source.encode()):,} bytes, more than {MAX_SOURCE_BYTES:,}")
        self.vocabulary = vocabulary
        self._source = source
        self._prototype = self._compile()
        if self._prototype.is_error():
            raise GrammarError(reason_of(self._prototype))

    def _compile(self) -> LLMatcher:
        return LLMatcher(self.vocabulary.tokens, self._source, log_level=0, limits=LIMITS)

    def start(self) -> Matcher:
        """Return a matcher at the beginning of the text."""
        return Matcher(self)

    def check_first_mask(self) -> None:
        """Compute the first mask; raise GrammarError if no token may be the first, or if it takes too long."""
        start, matcher = time.thread_time(), self.start()
        matcher.fill(np.zeros((1, self.vocabulary.num_words * 4), dtype=np.uint8), [NO_TOKEN], [NO_TOKEN])
        if matcher.error:
            raise GrammarError(f"no text can begin: {matcher.error}")
        if (seconds := time.thread_time() - start) > MAX_MASK_S:
            raise GrammarError(f"its first mask takes {seconds:.1f} s of CPU time; use fewer repetitions")

    def count_tokens(self, text: str) -> int | None:
        """Return the number of tokens of a text; None if the vocabulary cannot write it, or the grammar forbids it."""
        tokens = self.vocabulary.tokens.tokenize_str(text)
        state, _ = self.copy()
        is_whole = state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()
        return len(tokens) if is_whole and self.vocabulary.tokens.decode_bytes(tokens) == text.encode() else None

    def copy(self, failed: LLMatcher | None = None) -> tuple[LLMatcher, LLMatcher]:
        """Return a state at the beginning, and its prototype; compile again if the prototype is `failed`.

        All states share the lexer of their prototype, whose size is bounded: if it is full, all of them fail.
        """
        if failed is self._prototype:
            self._prototype = self._compile()
        return self._prototype.deep_copy(), self._prototype


class Matcher:
    """The state of a grammar after the tokens of one request; `error` is set once the text cannot be continued.

    Masks are rows of ⌈V / 32⌉ · 4 bytes, one bit per token, the lowest bit first.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._state, self._origin = grammar.copy()
        self._tokens: list[int] = []
        self.error = ""

    def advance(self, token: int) -> None:
        """Follow a generated token; EOS must be allowed, and is not followed."""
        if self.error:
            return
        if token in self._vocabulary.eos_ids:
            if not self._state.is_accepting():
                self.error = "an EOS token before the end of the structure"
            return
        if self._state.try_consume_tokens([token]) == 0:
            self._renew()
            if self._state.try_consume_tokens([token]) == 0:
                self.error = self.error or f"token {token} does not continue the structure"
        self._tokens.append(token)

    def fill(self, masks: NDArray[np.uint8], tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Write the mask of every node of a draft tree to `masks` (N, bytes), the root being the last token.

        Rows of nodes that no legal text reaches, or after which none continues, remain as they are. If the root has no
        continuation, `error` is set. Invalid nodes have the parent −1.
        """
        if self.error:
            return
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(node)
        if not self._visit(0, masks, tokens, children):
            self._renew()
            if not self.error and not self._visit(0, masks, tokens, children):
                self.error = reason_of(self._state)

    def _visit(
        self, node: int, masks: NDArray[np.uint8], tokens: Sequence[int], children: Sequence[Sequence[int]]
    ) -> bool:
        """Fill the masks of a subtree from the state at its root; return False if the library failed."""
        mask = self._mask()
        if mask is None:
            return False
        if not mask.any():
            if node == 0:
                self.error = "no token of the vocabulary continues the structure"
            return True
        masks[node] = mask
        for child in children[node]:
            if tokens[child] in self._vocabulary.eos_ids or self._state.try_consume_tokens([tokens[child]]) == 0:
                continue
            if not (self._visit(child, masks, tokens, children) and self._state.rollback(1)):
                return False
        return not self._state.is_error()

    def look(self, path: Sequence[int], mask: NDArray[np.uint8]) -> int:
        """Follow `path` from the last token, write the mask of the next one to `mask` (bytes,), and go back.

        Return the next token of text that the grammar forces, in its usual tokens, or the only allowed token;
        `NO_TOKEN` if there are several, or if the path is not legal, which leaves `mask` as it is.
        """
        if self.error or any(token in self._vocabulary.eos_ids for token in path):
            return NO_TOKEN
        taken = self._state.try_consume_tokens(list(path))
        forced = NO_TOKEN
        if taken == len(path) and (allowed := self._mask()) is not None and allowed.any():
            mask[:] = allowed
            if text := self._state.compute_ff_tokens():
                forced = text[0]
            elif np.bitwise_count(allowed).sum() == 1:
                forced = int(np.unpackbits(allowed, bitorder="little").argmax())
        if self._state.is_error() or not self._state.rollback(taken):
            self._renew()
            return NO_TOKEN
        return forced

    def _mask(self) -> NDArray[np.uint8] | None:
        """Return the mask of the next token; None if the library failed. EOS is allowed only after a whole text."""
        # The library adds a word if V is a multiple of 32.
        mask = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)[: len(self._vocabulary.eos_words)]
        if self._state.is_error():
            return None
        if self._state.is_accepting():
            return mask | self._vocabulary.eos_words
        return mask & ~self._vocabulary.eos_words

    def _renew(self) -> None:
        """Replace a state whose library failed by a new one after the same tokens; set `error` if it fails again."""
        self._state, self._origin = self._grammar.copy(self._origin)
        if self._state.try_consume_tokens(self._tokens) != len(self._tokens):
            self.error = reason_of(self._state)


def reason_of(state: LLMatcher) -> str:
    """Return the library's error message on one line, at most 300 characters."""
    text = state.get_error().replace("<non-verbose/>", "")
    return " ".join(text.split())[:300] or "the grammar cannot be followed"
