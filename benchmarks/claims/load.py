"""Loads claims, `data/*.yaml`, checks their citations and metrics, and renders them as a table.

A file has the `test_bed` in a sentence, and `claims`. A claim has its text, its citation (`cites`, a key of
data/citations.yaml, or `ours: true`), a `topic` that the citation must have, what `would_change` the verdict, and its
`checks`, which are repeated for all combinations of the values in `each`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmarks.claims.checks import Check, Compare, Frontier, Printed, as_good, nodes
from benchmarks.claims.reader import DRAFTS, LENGTH, Reader
from benchmarks.claims.verdict import WORDS, Finding, combine
from benchmarks.harness.markdown import table

DATA = Path(__file__).parent / "data"
PAPERS = {"tabed": "TABED", "lvspec": "LVSpec", "sage": "SAGE", "lantern": "LANTERN", "specvlm": "SpecVLM"}
NAMES = {LENGTH: "tokens per step", DRAFTS: "accepted drafts per step", "attribute_f1": "F1 of attribute words"}


@dataclass(frozen=True)
class Claim:
    """A text, its citation as text, and the checks that must all hold."""

    text: str
    cites: str
    checks: tuple[Check, ...]
    would_change: str = ""
    metrics: tuple[str, ...] = field(default=())


@cache
def citations() -> dict[str, dict[str, Any]]:
    """Return all citations by key `PAPER.ITEM`: the `topic`, what it `shows`, and the paper's `length` convention."""
    data: dict[str, Any] = yaml.safe_load((DATA / "citations.yaml").read_text(encoding="utf-8"))
    return {
        f"{paper}.{item}": {"paper": paper, "item": item, "length": about["length"], **entry}
        for paper, about in data.items()
        for item, entry in about["items"].items()
    }


def load_claims(name: str, special: Mapping[str, Check], folder: Path = DATA) -> list[Claim]:
    """Load the claims of a file; `special` are the checks that it names.

    Raises ValueError for a citation that does not exist or has another topic, for lengths that are compared by a factor
    in another convention than the paper's, and for quality by position alone if F1 is at hand.
    """
    data = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    return [_claim(entry, special, bool(data.get("attribute_words"))) for entry in data["claims"]]


def test_bed(name: str) -> str:
    return " ".join(yaml.safe_load((DATA / f"{name}.yaml").read_text(encoding="utf-8"))["test_bed"].split())


def _claim(entry: dict[str, Any], special: Mapping[str, Check], attribute_words: bool) -> Claim:
    checks = tuple(_checks(entry, special))
    text, cites, convention = " ".join(entry["claim"].split()), "ours", LENGTH
    if not entry.get("ours"):
        known = citations().get(entry["cites"])
        if known is None:
            raise ValueError(f"{text!r} cites {entry['cites']!r}, which data/citations.yaml lacks")
        if known["topic"] != entry["topic"]:
            raise ValueError(f"{text!r} is about {entry['topic']!r}; {entry['cites']} is about {known['topic']!r}")
        cites, convention = f"{PAPERS[known['paper']]}, {known['item']}", known["length"]
    compared = [check for check in checks if isinstance(check, Compare)]
    for check in compared:
        if check.factor != 1.0 and check.metric in (LENGTH, DRAFTS) and check.metric != convention:
            raise ValueError(f"{text!r} multiplies {NAMES[check.metric]}; the paper counts {NAMES[convention]}")
    if attribute_words:
        by_position = {(check.key, *check.others.values()) for check in compared if check.metric == "accuracy"}
        by_words = {(check.key, *check.others.values()) for check in compared if check.metric == "attribute_f1"}
        if missing := by_position - by_words:
            raise ValueError(f"{text!r} judges {sorted(missing)[0]} by position only; add a check of attribute_f1")
    metrics = tuple(dict.fromkeys(NAMES.get(metric, metric) for check in checks for metric in _metrics(check)))
    return Claim(text, cites, checks, " ".join(entry.get("would_change", "").split()), metrics)


def _metrics(check: Check) -> tuple[str, ...]:
    if isinstance(check, Compare):
        return (check.metric,)
    if isinstance(check, Frontier):
        return (DRAFTS, check.metric)
    return (LENGTH,) if isinstance(check, Printed) else ()


def _checks(entry: dict[str, Any], special: Mapping[str, Check]) -> Iterator[Check]:
    each = entry.get("each", {})
    for values in product(*each.values()):
        named = dict(zip(each, values, strict=True))
        for spec in entry["checks"]:
            yield from _parse(_filled(spec, named), special)


def _filled(spec: Any, named: Mapping[str, Any]) -> Any:
    """Return a specification with the names in its strings replaced."""
    if isinstance(spec, dict):
        return {key: _filled(entry, named) for key, entry in spec.items()}
    if isinstance(spec, list):
        return [_filled(entry, named) for entry in spec]
    return spec.format_map(named) if isinstance(spec, str) else spec


def _parse(spec: dict[str, Any], special: Mapping[str, Check]) -> Iterator[Check]:
    if "check" in spec:
        yield special[spec["check"]]
    elif "nodes" in spec:
        yield nodes(spec["nodes"])
    elif "more_nodes" in spec:
        yield nodes(spec["more_nodes"], more=True)
    elif "frontier" in spec:
        yield Frontier(spec["frontier"], tuple(spec["controls"]), spec.get("metric", "attribute_f1"))
    elif "printed" in spec:
        yield Printed(spec["own"], float(spec["printed"]), spec.get("within", 0.1), spec["label"])
    elif "as_good" in spec:
        yield from as_good(spec["as_good"], spec["label"])
    else:
        (word,) = spec.keys() & {"above", "above_one_of", "below"}
        others = spec[word] if isinstance(spec[word], dict) else {"": spec[word]}
        options = {key: value for key, value in spec.items() if key not in ("own", word)}
        yield Compare(spec["own"], others, below=word == "below", one_is_enough=word == "above_one_of", **options)


def decide_claim(claim: Claim, read: Reader) -> Finding:
    """Return whether all checks hold; undecided if results are missing."""
    try:
        return combine([check(read) for check in claim.checks])
    except KeyError as missing:
        return None, f"not run: {missing} is missing"


def claims_table(name: str, special: Mapping[str, Check], read: Reader) -> str:
    """Render the claims of a file with their test-bed."""
    rows = []
    for claim in load_claims(name, special):
        holds, numbers = decide_claim(claim, read)
        metric = ", ".join(claim.metrics) or "–"
        rows.append((claim.text, claim.cites, WORDS[holds], metric, numbers, claim.would_change or "–"))
    titles = "claim | source | holds here | metric | numbers [gap ± 95 % margin, n, pairs] | what would change it"
    return f"Test-bed: {test_bed(name)}\n\n{table(titles, rows)}"
