"""Generates the reference of refusals from the table of mistakes, which a test makes one by one."""

from __future__ import annotations

from docgen.markdown import page, table
from docgen.mistakes import GROUPS
from docgen.mistakes.mistake import Mistake

ABOUT = (
    "A dry run refuses a job that cannot run, before Ray starts: one line per problem on standard error, exit status "
    "2, nothing written. A refusal begins with the dotted path of a value and ends with its place, `(job.yaml, line "
    "12)` or `(command line)`. A job that is started without a dry run is refused in the same way. A test makes each "
    "of these mistakes. `{folder}` is the folder of the example."
)


def refusals_page() -> str:
    """Render the mistakes of each group: what was done, the values, and the beginning of the refusal."""
    parts = [ABOUT]
    for title, group in GROUPS.items():
        rows = [[mistake.name, _written(mistake), f"{_code(mistake.message)} …"] for mistake in group]
        parts += [f"## {title}", table(("mistake", "values", "refusal"), rows)]
    return page("Refusals", *parts)


def _written(mistake: Mistake) -> str:
    """Return the values, files and the environment of a mistake, and its command if it is no caption job."""
    values = [_code(text) for text in mistake.overrides]
    files = [f"a file {_code(name)}" for name in mistake.files if name != "job.yaml"]
    wrong = [_code(text.strip().replace("\n", "; ")) for name, text in mistake.files.items() if name == "job.yaml"]
    others = [mistake.environment] if mistake.environment else []
    command = [] if mistake.command == "caption" else [f"`draftfleet {mistake.command}`"]
    return ", ".join([*command, *values, *wrong, *files, *others])


def _code(text: str) -> str:
    return f"`{text}`"
