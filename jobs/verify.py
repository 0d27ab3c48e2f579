"""`python -m jobs.verify OUTPUT`: decode a share of a job's captions or images again, plainly or by another
configuration, under the same noise, and compare them with the output, which may be finished or still written. Images
are compared by their codes.

Exit status: 0 no row differs beyond the tie tolerance, 1 the verification failed or a row could not be compared, 2
refused (nothing was started), 3 rows differ or several rows have one id, 143 and 130 stopped by SIGTERM and SIGINT.
Rows of lossy methods may differ: then 3 means that the upper bound of the mean loss is above --max-loss.

Every sample is chosen with probability --share, so that a share s contains at least one of k faulty samples with
probability 1 - (1 - s)^k. If none of n verified samples differs, at most 1 - 0.05^(1/n), about 3/n, of all samples
differ at 95 % confidence (Clopper-Pearson).
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from actors.losses import MetricError
from actors.serving.crash_ledger import EngineFailed, ErrorBudgetSpent
from configs.load import ConfigError
from jobs import caption, synthesize
from jobs.terminal.arguments import new_parser
from pipeline.cluster import signals
from pipeline.verify.compare import NOT_COMPARED
from pipeline.verify.run import Verification, prepare, verify
from pipeline.verify.second import Settings

EQUAL, FAILED, REFUSED, DIFFERENT = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Verify one output and return the exit status."""
    arguments = parser().parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    with signals.catch_signals() as stop:
        try:
            settings = Settings(
                arguments.output,
                arguments.share,
                arguments.seed,
                arguments.against,
                arguments.metric,
                arguments.tie_tolerance,
                tuple(arguments.overrides),
            )
            prepared = prepare(settings)
            if arguments.max_loss is not None and not prepared.inexact:
                raise ConfigError("--max-loss: the output and the second decoding are lossless, so no loss is allowed")
            print(f"verifying {prepared.num_chosen:,} rows of {prepared.job.output.shown()}", flush=True)
            if line := prepared.plan.resources.line():
                print(f"gpus: {line}", flush=True)
            verification = verify(prepared, (synthesize if prepared.job.makes_images else caption).results)
        except ConfigError as error:
            print(f"refused: {error}", file=sys.stderr)
            return REFUSED
        except (MetricError, ErrorBudgetSpent, EngineFailed) as error:
            print(f"the verification was ended: {error}", file=sys.stderr)
            return FAILED
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt):
                if stop.number is None:
                    raise
                print(f"the verification was stopped by {stop.name}", file=sys.stderr)
                return stop.status
            traceback.print_exc()
            return FAILED
    print(*verification.lines(), sep="\n")
    return status_of(verification, arguments.max_loss)


def status_of(verification: Verification, max_loss: float | None) -> int:
    """Return the exit status of a finished verification."""
    if verification.prepared.repeated:
        return DIFFERENT
    if verification.prepared.inexact:
        is_wrong = max_loss is not None and verification.loss_interval[1] > max_loss
    else:
        is_wrong = verification.num_different > 0
    return DIFFERENT if is_wrong else FAILED if verification.counts[NOT_COMPARED] else EQUAL


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("verify", __doc__ or "", "out/mine --share 0.05")
    add = parser.add_argument
    add("output", help="the output directory, as sink.path has it")
    add("overrides", nargs="*", metavar="section.field=value", help="values that replace those of the second decoding")
    add = parser.add_argument_group("rows").add_argument
    add(
        "--share", type=_share, default=0.01, metavar="S", help="share of samples to verify, above 0 to 1; default 0.01"
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the choice; another seed chooses other samples")
    add = parser.add_argument_group("comparison").add_argument
    about = "job file whose model, method, sampling and pool decode the rows again; by default plain decoding"
    add("--against", type=Path, metavar="CONFIG", help=about)
    about = "loss per row: exact, edit (edit distance over length), or module:function(text, second_text), from 0 to 1"
    add("--metric", default="exact", metavar="M", help=about)
    about = "largest difference of the target's scores that counts as a tie; by default of the target's dtype"
    add("--tie-tolerance", type=_tolerance, metavar="X", help=about)
    add("--max-loss", type=_loss, metavar="L", help="for lossy methods: largest mean loss, 0 to 1")
    return parser


def _number(text: str, what: str, low: float, high: float, includes_low: bool = True) -> float:
    value = float(text)
    if not (low <= value <= high) or (value == low and not includes_low):
        raise argparse.ArgumentTypeError(f"must be {what}, not {text}")
    return value


def _share(text: str) -> float:
    return _number(text, "above 0 and at most 1", 0.0, 1.0, includes_low=False)


def _loss(text: str) -> float:
    return _number(text, "from 0 to 1", 0.0, 1.0)


def _tolerance(text: str) -> float:
    return _number(text, "a number of at least 0", 0.0, 1e9)


if __name__ == "__main__":
    sys.exit(main())
