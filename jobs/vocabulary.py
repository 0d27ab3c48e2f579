"""`python -m jobs.vocabulary --target MODEL --out FILE SOURCE ...`: count the tokens of texts, for drafters with a
restricted vocabulary (`method.drafter.vocabulary`).

A source is the output of a finished job, a Parquet file, or a text file with one text per line. Exit status: 0 done, 2
refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import ConfigError
from jobs.terminal.arguments import new_parser
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointError, CheckpointRef, read_config, read_processor
from models.loading.vocabulary import write_tokens
from pipeline.storage.retries import planning
from pipeline.training.token_counts import SHARES, Counted, count_tokens, texts_of

DONE, REFUSED = 0, 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("vocabulary", __doc__ or "", "--target MODEL --out tokens.json out/mine")
    add = parser.add_argument_group("tokenizer").add_argument
    add("--target", required=True, help="folder or hub id of the model whose tokenizer counts")
    add("--revision", help="the hub's commit, tag or branch")
    add = parser.add_argument_group("texts").add_argument
    add("sources", nargs="+", metavar="SOURCE", help="job output, Parquet file or text file; any URL")
    add("--column", default="generated_text", help="the column of Parquet files that holds the texts")
    add = parser.add_argument_group("result").add_argument
    add("--out", required=True, type=Path, help="the file to write, for method.drafter.vocabulary.path")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Count tokens, write the vocabulary file and return the exit status."""
    arguments = parser().parse_args(argv)
    try:
        with planning():
            counted = _count(arguments)
        write_tokens(arguments.out, counted.tokens, f"{counted.num_texts} texts by the tokenizer of {arguments.target}")
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"refused: {arguments.out} cannot be written: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    shares = ", ".join(f"{100 * share:g} % by {counted.size_for(share):,}" for share in SHARES)
    different = f"{counted.num_tokens:,} tokens, {len(counted.tokens):,} of them different"
    print(f"texts         {counted.num_texts:,} of {different}")
    print(f"covered       {shares}")
    print(f"list          {arguments.out} (as method.drafter.vocabulary.path; .size takes the first so many)")
    return DONE


def _count(arguments: argparse.Namespace) -> Counted:
    """Count tokens; raise ConfigError if the target has no tokenizer, a source is unreadable, or there is no text."""
    ref = CheckpointRef(arguments.target, arguments.revision)
    try:
        tokenizer = FrontEnd(read_processor(ref, read_config(ref))).tokenizer
    except CheckpointError as error:
        raise ConfigError(f"--target: {error}") from None
    counted = count_tokens(texts_of(arguments.sources, arguments.column), tokenizer)
    if not counted.tokens:
        raise ConfigError(f"{', '.join(arguments.sources)}: there is no text to count")
    return counted


if __name__ == "__main__":
    sys.exit(main())
