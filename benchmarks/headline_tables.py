"""The headline table of the README: acceptance and quality of a few methods on single images."""

from __future__ import annotations

from typing import Any

SHOWN = {
    "plain": "plain decoding",
    "sd_chain": "SD-chain, 5 drafts",
    "sd_tree": "SD-tree, 25 nodes",
    "eagle2": "EAGLE-2",
    "medusa": "Medusa",
    "sage": "SAGE",
    "specvlm": "SpecVLM",
    "lvspec": "LVSpec",
}
"""Name in the results → label."""


def headline_table(results: dict[str, Any]) -> str:
    """Acceptance length, target forwards per token and quality on the scenario of single images."""
    lines = [
        "| method | mode | acceptance length | target forwards per token | attributes right | rows equal to plain |",
        "|---|---|---|---|---|---|",
    ]
    for name, label in SHOWN.items():
        method = results["methods"][name]
        cell = method["scenarios"]["single"]
        lines.append(
            f"| {label} | {method['verify_mode']} | {cell['mean_acceptance_length']:.2f} "
            f"| {cell['target_forwards_per_token']:.2f} | {100 * cell['accuracy']:.0f} % "
            f"| {100 * cell['equal_share']:.0f} % |"
        )
    return "\n".join(lines)


TABLES = {"headline": headline_table}
