"""Record which functions of a checkout run in a caption job, in all of its processes.

    python -m docgen.hot_path --root CHECKOUT --config JOB.yaml --out FILE [section.field=value …]

Every Python process that the job starts imports a `sitecustomize` module from a temporary folder. It appends
`path:function` to a file at the first call of each function; code of modules and class bodies does not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROFILER = """
import os, sys, threading
_root = os.environ["HOT_PATH_ROOT"] + os.sep
_file = open(os.path.join(os.environ["HOT_PATH_OUT"], str(os.getpid())), "a", buffering=1)
_seen = set()
def _profile(frame, event, argument):
    code = frame.f_code
    if event != "call" or code in _seen:
        return
    _seen.add(code)
    if code.co_filename.startswith(_root) and ".venv" not in code.co_filename and "<module>" not in code.co_name:
        if code.co_flags & 2:  # CO_NEWLOCALS: functions, not class bodies
            _file.write(code.co_filename[len(_root):] + ":" + code.co_qualname.replace(" ", "") + "\\n")
threading.setprofile(_profile)
sys.setprofile(_profile)
"""


def record(root: Path, config: str, overrides: Sequence[str]) -> set[str]:
    """Run the job in `root`; return `path:function` of every function called.

    Raises:
        subprocess.CalledProcessError: the job failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch, listing = Path(folder), Path(folder) / "calls"
        listing.mkdir()
        (scratch / "sitecustomize.py").write_text(PROFILER)
        variables = {"PYTHONPATH": str(scratch), "HOT_PATH_ROOT": str(root), "HOT_PATH_OUT": str(listing)}
        command = [sys.executable, "-m", "jobs.caption", "--config", config, *overrides]
        subprocess.run(command, cwd=root, env={**os.environ, **variables}, check=True)
        return {line for file in listing.iterdir() for line in file.read_text().split()}


def main(argv: Sequence[str] | None = None) -> int:
    """Record one job and write the sorted listing."""
    parser = argparse.ArgumentParser(prog="python -m docgen.hot_path", description="Record the functions of a job.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to run")
    parser.add_argument("--config", default="configs/jobs/zoo_caption_plain.yaml", help="the caption job")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="values that replace the YAML's")
    arguments = parser.parse_intermixed_args(argv)
    called = record(arguments.root.resolve(), arguments.config, arguments.overrides)
    arguments.out.write_text("\n".join(sorted(called)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
