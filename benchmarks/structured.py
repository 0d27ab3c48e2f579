"""Measures structured output: valid texts, acceptance with and without forced tokens, and the cost of masks.

    python -m benchmarks.structured     # writes results/structured.json; minutes
    python -m benchmarks.structured --checkpoint out/real/target --label SmolLM2-135M     # also a text model alone

Greedy texts. All methods decode the same requests; every text that ended is validated by jsonschema.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch

from actors.loading.pair import load
from benchmarks.harness.engines import acceptance_of, run_requests
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.harness.results import command_line, finish, machine, progress, results_file
from benchmarks.methods.scenarios import build_scenarios
from configs.load import load_preset
from configs.schema import CaptionJob
from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.contracts import Drafter
from decoding.drafters import GrammarDrafter, LookupDrafter, ModelDrafter, NoDrafter
from decoding.grammar import NO_TOKEN, Grammar, Vocabulary, schema_source
from decoding.trees import Chain
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text.samples import held_out_prompts

RESULTS = results_file("structured")
SLOTS, DEPTH, MAX_CONTEXT_TOKENS, MASK_ROWS = 8, 5, 512, 32
SAMPLING = Sampling(max_new_tokens=160)


def record(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "caption": record(
        {
            "caption": {"type": "string", "maxLength": 60},
            "kind": {"enum": ["photo", "drawing", "diagram"]},
            "number_of_objects": {"type": "integer", "minimum": 0, "maximum": 99},
        }
    ),
    "nested": record(
        {
            "größe": {"type": "number", "minimum": -10, "maximum": 10},
            "labels": {"type": "array", "items": {"enum": ["naïve", 'a "quoted" word', "日本"]}, "maxItems": 3},
            "box": record({"left": {"type": "integer", "maximum": 999}, "visible": {"type": "boolean"}}),
        }
    ),
}
DESCRIBED = tuple(
    f"{kind} of {thing}"
    for kind in ("a photo", "a drawing", "a painting", "a plan")
    for thing in ("a dog", "two cats", "a house", "red apples", "a map", "the sea")
)
SPELLING = '{"caption": "a dog", "kind": "drawing", "number_of_objects": 12}'
Made = Callable[[], Method]


def methods_of(target: Target, drafter: Target | None) -> dict[str, Made]:
    """Return the methods of one pair by name."""

    def small() -> ModelDrafter:
        assert drafter is not None
        return ModelDrafter(drafter, [Full()], target.vocab_size)

    def forced(inner: Drafter | None = None) -> Drafter:
        return GrammarDrafter(inner)  # type: ignore[return-value]

    made: dict[str, Made] = {
        "plain": lambda: Method(NoDrafter(), Chain(1), Exact()),
        "grammar": lambda: Method(forced(), Chain(DEPTH), Exact()),
        "lookup": lambda: Method(LookupDrafter(), Chain(DEPTH), Exact()),
        "lookup, forced tokens": lambda: Method(forced(LookupDrafter()), Chain(DEPTH), Exact()),
    }
    if drafter is not None:
        made["model"] = lambda: Method(small(), Chain(DEPTH), Exact())
        made["model, forced tokens"] = lambda: Method(forced(small()), Chain(DEPTH), Exact())
    return made


def run_pair(target: Target, drafter: Target | None, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the results of all schemas and methods on one pair, and the cost of masks."""
    vocabulary = Vocabulary(target.front_end.tokenizer, target.vocab_size, target.eos_ids)
    cells: dict[str, Any] = {}
    for schema_name, schema in SCHEMAS.items():
        grammar = Grammar(schema_source(schema), vocabulary)
        wanted = [Request(r.sample_id, r.prompt, r.images, SAMPLING, r.seed, grammar=grammar) for r in requests]
        plain: list[Completion] = []
        cells[schema_name] = {}
        for name, make in methods_of(target, drafter).items():
            done = run_requests(Engine(target, make(), SLOTS, MAX_CONTEXT_TOKENS), wanted)
            plain = plain or done
            ended = [one for one in done if one.finish_reason == "stop"]
            cells[schema_name][name] = acceptance_of(done) | {
                "num_rows": len(done),
                "num_ended": len(ended),
                "num_valid": sum(is_valid(one.text, schema) for one in ended),
                "equal_share": sum(a.token_ids == b.token_ids for a, b in zip(done, plain, strict=True)) / len(done),
            }
            progress(f"{schema_name:10s} {name:24s} {cells[schema_name][name]['mean_acceptance_length']:.2f}")
    return {"cells": cells, "vocab_size": target.vocab_size, "mask_ms": mask_ms(vocabulary)}


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Return whether a text is JSON that follows the schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def mask_ms(vocabulary: Vocabulary) -> dict[str, float]:
    """Return the mean milliseconds of a step's masks of 32 rows: without drafts, and with `DEPTH` legal ones."""
    grammar = Grammar(schema_source(SCHEMAS["caption"]), vocabulary)
    tokens = vocabulary.tokens.tokenize_str(SPELLING)
    found = {}
    for name, depth in (("plain", 0), ("chain", DEPTH)):
        rows = [grammar.start() for _ in range(MASK_ROWS)]
        masks = np.zeros((depth + 1, vocabulary.num_words * 4), dtype=np.uint8)
        spent: list[float] = []
        for place in range(len(tokens) - depth):
            nodes = [NO_TOKEN, *tokens[place : place + depth]]
            start = time.perf_counter()
            for row in rows:
                row.fill(masks, nodes, range(-1, depth))
            spent.append(time.perf_counter() - start)
            for row in rows:
                row.advance(tokens[place])
        found[name] = 1000 * sum(spent) / len(spent)
    return found


def text_requests(num_rows: int, seed: int) -> list[Request]:
    return [Request(f"t{place}", one) for place, one in enumerate(held_out_prompts(num_rows, seed))]


def acceptance_table(results: Results) -> str:
    """Render acceptance lengths and validity by pair, schema and method."""
    lines = []
    for pair, one in results["pairs"].items():
        for schema, methods in one["cells"].items():
            for name, cell in methods.items():
                length = f"{cell['mean_acceptance_length']:.2f} ± {cell['acceptance_length_se']:.2f}"
                whole = f"{cell['num_valid']} of {cell['num_ended']}"
                lines.append([pair, schema, name, length, percent(cell["equal_share"]), whole])
    head = ["pair", "schema", "method", "acceptance length", "equal to plain", "ended texts that are valid"]
    return table(head, lines)


def mask_table(results: Results) -> str:
    """Render the cost of masks."""
    lines = [
        [pair, f"{one['vocab_size']:,}", f"{one['mask_ms']['plain']:.2f} ms", f"{one['mask_ms']['chain']:.2f} ms"]
        for pair, one in results["pairs"].items()
    ]
    return table(["pair", "vocabulary", f"{MASK_ROWS} rows", f"{MASK_ROWS} rows, chains of {DEPTH}"], lines)


TABLES = {"structured": acceptance_table, "structured_masks": mask_table}


def run_all(num_rows: int, seed: int, own: tuple[str, Path] | None) -> dict[str, Any]:
    """Return the results of the shipped pairs, and of the model `own` (label, folder)."""
    described = {"num_rows": num_rows, "seed": seed, "machine": machine(), "torch": torch.__version__}

    def target_of(path: Path) -> Target:
        return Target.load(CheckpointRef(str(path)), "float32", "cpu")

    pairs = {}
    text, smaller = target_of(CHECKPOINTS / "text_target"), target_of(CHECKPOINTS / "text_drafter")
    pairs["text"] = run_pair(text, smaller, text_requests(num_rows, seed))
    captions = load(load_preset(CaptionJob, "zoo_sd_chain"))
    assert isinstance(captions.drafter, Target)
    cases = build_scenarios(num_rows, seed)["single"]
    asked = [Request(one.case_id, captions.render(one.messages), one.images, seed=seed) for one in cases]
    pairs["caption"] = run_pair(captions.target, captions.drafter, asked)
    if own is not None:
        prompts = [f"Describe {what} as JSON with caption, kind and number_of_objects:\n" for what in DESCRIBED]
        asked = [Request(f"r{place}", prompt) for place, prompt in enumerate(prompts)]
        pairs[own[0]] = run_pair(target_of(own[1]), None, asked)
    return described | {"pairs": pairs}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("structured", __doc__)
    parser.add_argument("--rows", type=int, default=48, help="prompts of each shipped pair (48)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="folder of a text model")
    parser.add_argument("--label", default="own", help="its name in the tables (own)")
    options = parser.parse_args(arguments)
    own = None if options.checkpoint is None else (options.label, options.checkpoint)
    return finish(RESULTS, run_all(options.rows, options.seed, own), acceptance_table)


if __name__ == "__main__":
    sys.exit(main())
