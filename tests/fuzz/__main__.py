"""Reads mutated files of all formats, each between two valid files, as a job does.

    python -m tests.fuzz [NUM_FILES] [--first SEED]    # 10,000 from seed 0 by default; writes tests/fuzz/fuzz.json

Each file must be one row, or rows, with content or with a known error code; rows of its neighbours must not change; and
reading and decoding must stay within the bounds of memory and time of `tests.fuzz.reader`. A file that has a fault is
saved in build/fuzz/ under its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.reader import mutation_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS, SAVED = Path(__file__).parent / "fuzz.json", ROOT / "build" / "fuzz"
HANG_S = 180.0
"""Seconds without a line after which a reader hangs: more than `timeout_s` of three files on a busy machine."""
MAX_CPU_S = 10.0
"""CPU seconds of one source in the reading process."""


def outcomes(first: int, stop: int, folder: Path, module: str = "tests.fuzz.reader") -> Iterator[dict[str, Any]]:
    """The outcome of every seed; a reader that a file has ended or stopped is started again behind it."""
    while first < stop:
        command = [sys.executable, "-m", module, str(first), str(stop), str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as reader:
            begun, reason = first, ""
            assert reader.stdout is not None
            while not reason:
                if not select.select([reader.stdout], [], [], HANG_S)[0]:
                    reader.kill()
                    reason = f"no outcome after {HANG_S:g} s"
                elif not (line := reader.stdout.readline()):
                    reason = f"the reading process ended with code {reader.wait()}"
                elif "begun" in (outcome := json.loads(line)):
                    begun = outcome["begun"]
                else:
                    first = outcome["seed"] + 1
                    yield outcome
        if first < stop:
            yield {"seed": begun, "name": mutation_of(begun)[0].name, "codes": [], "faults": [reason]}
            first = begun + 1


def save(seed: int, folder: Path = SAVED) -> Path:
    """Write the mutated file of a seed, and return its path."""
    valid, data = mutation_of(seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{seed}.{valid.suffix}"
    path.write_bytes(data)
    return path


def run(num_files: int, first: int = 0, saved: Path = SAVED, module: str = "tests.fuzz.reader") -> dict[str, Any]:
    """Read the mutated files of seeds from `first` on; counts of error codes by kind of file, peaks, and faults."""
    codes: dict[str, Counter[str]] = {}
    peaks: Counter[str] = Counter()
    faults = []
    with tempfile.TemporaryDirectory() as temporary:
        for outcome in outcomes(first, first + num_files, Path(temporary) / "source", module):
            codes.setdefault(outcome["name"], Counter()).update(outcome["codes"])
            for name in ("cpu_s", "reader_bytes", "decoder_bytes"):
                peaks[name] = max(peaks[name], outcome.get(name, 0))
            found = [*outcome["faults"]]
            if outcome.get("cpu_s", 0) > MAX_CPU_S:
                found.append(f"reading took {outcome['cpu_s']} CPU seconds")
            if found:
                faults.append({"seed": outcome["seed"], "name": outcome["name"], "faults": found})
                print(f"{save(outcome['seed'], saved)}: {found[0]}", file=sys.stderr, flush=True)
    return {
        "num_files": num_files,
        "first": first,
        "faults": faults,
        "peaks": dict(peaks),
        "codes": {name: dict(sorted(counts.items())) for name, counts in sorted(codes.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("num_files", type=int, nargs="?", default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    results = run(options.num_files, options.first)
    if options.first == 0 and not results["faults"]:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{options.num_files} files, {len(results['faults'])} with faults; peaks {results['peaks']}")
    return 1 if results["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
