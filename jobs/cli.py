"""The command `draftfleet`: runs one of the jobs by its name, without importing the others."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from files.installation import version

COMMANDS = {
    "caption": "caption images, videos or texts, speculatively",
    "synthesize": "generate images for prompts",
    "estimate": "measure what a job would take, on a sample of its rows",
    "compare": "run methods over the same rows; compare speed, acceptance and outputs",
    "verify": "decode a share of an output again and compare",
    "check": "check an output against its manifest",
    "check-method": "check a method, and classes of yours that it names, on a small random model",
    "export": "export results as tars, files, a dataset folder, sidecars or a column",
    "quality": "measure generated images: agreement with prompts, distance to references",
    "sheet": "draw generated images as a contact sheet, or two outputs side by side",
    "submit": "submit a job to a Ray cluster; follow, query or stop it",
    "train-drafter": "train a drafter for a target",
    "vocabulary": "count tokens for a drafter with a restricted vocabulary",
    "completion": "print the completion script of bash or zsh",
}
"""Commands in the order of the help; the module of each is `jobs.NAME`, with underscores."""
REFUSED = 2
VERSION_VARIABLE = "DRAFTFLEET_VERSION"
"""Set by `draftfleet submit`: the version that must run the job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 if there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else REFUSED
    if words[0] == "--version":
        print(f"draftfleet {version()}")
        return 0
    name = words[0].replace("_", "-")
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        print(f"draftfleet: there is no command {words[0]!r}; {hint}", file=sys.stderr)
        return REFUSED
    wanted = os.environ.get(VERSION_VARIABLE, version())
    if wanted != version():
        print(
            f"refused: the job was submitted by draftfleet {wanted}, and this machine has {version()}; install the "
            "same version on all nodes",
            file=sys.stderr,
        )
        return REFUSED
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, for metrics of the user; nothing of ours is found there
    status: int = module_of(name).main(words[1:])
    return status


def module_of(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"{__package__}.{name.replace('-', '_')}")


def usage() -> str:
    """Return the help of `draftfleet`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{about}" for name, about in COMMANDS.items()]
    return "\n".join(
        [
            "usage: draftfleet COMMAND [ARGUMENTS]",
            "",
            "Caption or synthesize datasets on Ray with speculative decoding that is exact or is marked as lossy.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            f"  {'COMMAND --help':<{width}}the arguments of a command, with an example",
            f"  {'--version':<{width}}the version",
            "",
            "example: draftfleet caption demo_folder source.path=PICTURES sink.path=out/mine --limit 20",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
