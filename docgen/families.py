"""The page of model families: what was proven for each by `python -m tests.conformance.family_matrix`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("families.json")
PROMPTS = ("text", "one image", "several images")
INTRODUCTION = """# Model families

Tiny models of the real classes of transformers with random weights ran in the engine. A cell names the kinds of drafts
(plain decoding, a chain, a tree) for which all tokens equaled those of transformers' `generate` in fp32, with 1, 4 and
9 slots. Prompts were shorter and longer than windows and chunks. `-` is a kind of prompt that the family's processor
does not take. `python -m tests.conformance.family_matrix` repeats the runs and writes the table.

Other models run if they pass [the check at load time](../methods/index.md#model-families).
"""


def families_page() -> str:
    """Return the page from the recorded runs."""
    recorded: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    lines = [INTRODUCTION, f"| toy | class | {' | '.join(PROMPTS)} |", "|---|---|" + "---|" * len(PROMPTS)]
    for name, row in recorded["families"].items():
        cells = [", ".join(row["proven"][kind]) or "none" if kind in row["proven"] else "-" for kind in PROMPTS]
        lines.append(f"| `{name}` | `{row['class']}` | {' | '.join(cells)} |")
    lines += ["", "## Refused", "", "Examples of models that are refused at load time, with the reason.", ""]
    lines += ["| model type | reason |", "|---|---|"]
    lines += [f"| `{kind}` | {reason} |" for kind, reason in recorded["refused"].items()]
    return "\n".join(lines) + "\n"
