"""The full product of the conformance suite, run by `make test-product`; its result is committed.

python -m tests.conformance.product      # every method × family × batch × mode; writes product.json

Vision-language families get images, and a video in every third request if they support it. Image models are listed by
their condition: text, class. Lossy rules run at their zero setting, as `…-zero`.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path

import torch
import transformers

from tests.conformance import images, methods

RESULT = Path(__file__).parent / "product.json"


def main() -> int:
    """Run all cases; 1 if any failed."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows, failed = [], 0
    text = [(case, functools.partial(methods.check_case, case)) for case in methods.every_case()]
    cases = [*text, *((case, functools.partial(images.check_equal, *case)) for case in images.every_case())]
    for number, (case, check) in enumerate(cases, start=1):
        method, family, slots, mode = case
        row: dict[str, object] = {"method": method, "family": family, "slots": slots, "mode": mode}
        try:
            row["acceptance_length"] = round(check(), 4)
            row["equal"] = True
        except AssertionError as error:
            row["equal"] = False
            row["error"] = str(error)[:200]
            failed += 1
        rows.append(row)
        if sys.stderr.isatty() or number % 100 == 0:
            rate = number / (time.perf_counter() - start)
            print(f"{number}/{len(cases)} cases, {failed} failed, {rate:.1f} cases/s", file=sys.stderr, flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    RESULT.write_text(json.dumps({"versions": versions, "num_cases": len(cases), "num_failed": failed, "cases": rows}))
    print(f"{len(cases) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
