"""Run every model family of the conformance suite by kind of prompt and of draft, and write what was proven.

python -m tests.conformance.family_matrix            # rewrites docgen/families.json
python -m tests.conformance.family_matrix --check    # compares only; exit status 1 if a cell differs

A cell is proven if the tokens of all its prompts equal those of transformers' `generate` in fp32, with 1, 4 and 9
slots.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from models.loading.checkpoints import CheckpointError
from models.target import Target
from tests import toys
from tests.conformance import checks, masked
from tests.models.architectures import make

FILE = Path(__file__).resolve().parents[2] / "docgen" / "families.json"
DRAFTS = {"plain": ("none", "chain"), "chain": ("perturbed", "chain"), "tree": ("perturbed", "ragged")}
SLOTS = (1, 4, 9)
NUM_PROMPTS = 4
CAPACITY = 512
REFUSED: dict[str, dict[str, Any]] = {
    "bloom": {},
    "doge": {},
    "moshi": {"sliding_window": 40},
    "phi3 (longrope)": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 128,
        }
    },
}
"""Tiny text models that are refused, with changes of their configurations."""


def requests(family: str, num_images: int) -> list[Request]:
    """Return prompts with `num_images` images, shorter and longer than the windows of the toys."""
    made = toys.family_of(family)
    first, marks = (masked.FIRST_WORD, range(3, masked.FIRST_WORD)) if family in toys.MASKED else (10, ())
    sampling = Sampling(max_new_tokens=10, suppress_tokens=tuple(marks) if made.takes_images else ())
    wanted = []
    for number in range(NUM_PROMPTS):
        length = (4, 9, 17, 33)[number]
        words = [f"w{first + (7 * i + 5 * number) % (toys.VOCAB_SIZE - first)}" for i in range(length)]
        for image in range(num_images):
            words.insert(0 if family == "paligemma" else (3 * number + 5 * image) % (length + 1), made.placeholder)
        images = tuple(toys.picture(20 * number + image, family) for image in range(num_images))
        wanted.append(Request(f"{num_images}-{number}", " ".join(["<s>", *words]), images, sampling, seed=1))
    return wanted


def is_equal(family: str, num_images: int, drafts: str) -> bool:
    """Return whether all tokens of a cell equal those of `generate`."""
    target, wanted = toys.target(family), requests(family, num_images)
    drafter, tree = DRAFTS[drafts]
    for slots in SLOTS:
        method = Method(checks.make_drafter(drafter, family), checks.TREES[tree](), Exact())
        copies = [replace(request, sample_id=f"{request.sample_id}-{i}") for request in wanted for i in range(2)]
        done = checks.run(Engine(target, method, slots, CAPACITY), copies)
        for request in wanted:
            expected = checks.generated(family, request, target.eos_ids)
            if any(done[f"{request.sample_id}-{i}"].token_ids != expected for i in range(2)):
                return False
    return True


def row_of(family: str) -> dict[str, Any]:
    """Return the proven cells of a family, by kind of prompt."""
    takes_images = toys.family_of(family).takes_images
    counts = {"text": 0, "one image": 1, "several images": 2} if takes_images else {"text": 0}
    if family == "paligemma":
        counts = {"one image": 1}
    cells = {kind: [name for name in DRAFTS if is_equal(family, count, name)] for kind, count in counts.items()}
    config: Any = toys.oracle(family).config
    return {"type": config.model_type, "class": type(toys.oracle(family)).__name__, "proven": cells}


def refusal_of(kind: str) -> str:
    """Return why a tiny model is refused."""
    try:
        Target(make(kind.split(" ")[0], **REFUSED[kind]), toys.front_end("llama"), "model")
    except CheckpointError as error:
        return str(error).removeprefix("model: cannot be run: ").split(";")[0]
    raise AssertionError(f"{kind} is not refused")


def matrix(families: Sequence[str]) -> dict[str, Any]:
    """Return what is proven for `families`, and reasons of refusals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "families": {family: row_of(family) for family in families},
            "refused": {kind: refusal_of(kind) for kind in REFUSED},
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.family_matrix")
    parser.add_argument("--check", action="store_true", help="compare with the committed file only")
    arguments = parser.parse_args(argv)
    text = json.dumps(matrix([*toys.FAMILIES, *toys.MASKED]), indent=1) + "\n"
    if arguments.check:
        return int(text != FILE.read_text(encoding="utf-8"))
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
