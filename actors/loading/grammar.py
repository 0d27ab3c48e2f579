"""Compiles the section `output` of a job to a grammar over the target's tokens."""

from __future__ import annotations

from typing import Any

from configs.load import ConfigError
from configs.output import OutputConfig
from configs.schema import CaptionJobConfig
from decoding.grammar import Grammar, GrammarError, Vocabulary, choices_source, regex_source, schema_source


def check_output(config: CaptionJobConfig, tokenizer: Any, vocab_size: int) -> None:
    """Check that `output` compiles and can be written in the target's `vocab_size` tokens, without its weights.

    Raises:
        ConfigError: it cannot, or a choice has more tokens than `sampling.max_new_tokens`; names the dotted path.
    """
    output = config.output
    if output is None:
        return
    # Whether a grammar is valid does not depend on the EOS token, which the generation config may replace.
    eos_id = getattr(tokenizer, "eos_token_id", None)
    grammar = compile_output(output, tokenizer, vocab_size, frozenset([0 if eos_id is None else eos_id]))
    try:
        grammar.check_first_mask()
    except GrammarError as error:
        raise ConfigError(f"{_where(output)}: {error}") from None
    most = config.sampling.max_new_tokens
    for index, text in enumerate(output.choices):
        num_tokens = grammar.count_tokens(text)
        if num_tokens is None:
            raise ConfigError(f"output.choices.{index}: {text!r:.100} cannot be written in the target's tokens")
        if num_tokens + 1 > most and config.columns.max_new_tokens is None:
            raise ConfigError(
                f"output.choices.{index}: {text!r:.100} has {num_tokens} tokens and EOS, more than "
                f"sampling.max_new_tokens {most}"
            )


def compile_output(output: OutputConfig, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Grammar:
    """Compile `output`; raise ConfigError with its dotted path if it is invalid or uses unsupported features."""
    try:
        if output.json_schema is not None:
            source = schema_source(output.json_schema)
        elif output.regex is not None:
            source = regex_source(output.regex)
        else:
            source = choices_source(output.choices)
        return Grammar(source, Vocabulary(tokenizer, vocab_size, eos_ids))
    except GrammarError as error:
        raise ConfigError(f"{_where(output)}: {error}") from None


def _where(output: OutputConfig) -> str:
    return f"output.{next(iter(output.content()))}"
