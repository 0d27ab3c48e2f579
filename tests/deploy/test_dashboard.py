"""The dashboard names only metrics and labels that the actors really export, and shows every one of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from actors.metrics import DRIFT_METRICS, LABELS, METRICS
from pipeline.rows.schemas import ERROR_CODES

ROOT = Path(__file__).resolve().parents[2]
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "deploy/grafana.json").read_text())


def exported() -> dict[str, set[str]]:
    """Every exported name and the labels of its series."""
    labels_of = {}
    for name, metric in (METRICS | DRIFT_METRICS).items():
        labels = {*LABELS, *([metric.label] if metric.label else [])}
        if metric.kind == "histogram":
            labels_of |= {metric.exported(name) + part: labels | {"le"} for part in HISTOGRAM_PARTS}
        else:
            labels_of[metric.exported(name)] = labels
    return labels_of


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(ray_\w+|draftfleet_\w+)", expression))


def unknown_in(expression: str) -> set[str]:
    """Metrics that no code exports, and labels that none of the expression's metrics has."""
    names = names_in(expression)
    labels = set().union(*(exported().get(name, set()) for name in names))
    grouped = re.findall(r"\bby \(([^)]*)\)|\bignoring \(([^)]*)\)", expression)
    used = {label for groups in grouped for group in groups for label in re.split(r"[, ]+", group) if label}
    used |= set(re.findall(r"(\w+)=~?\"", expression))
    return (names - set(exported())) | (used - labels)


def test_every_expression_names_metrics_and_labels_that_exist(dashboard: dict[str, Any]) -> None:
    assert len(expressions(dashboard)) > 10
    assert {expression: unknown for expression in expressions(dashboard) if (unknown := unknown_in(expression))} == {}


def test_every_metric_is_shown_somewhere(dashboard: dict[str, Any]) -> None:
    shown = set().union(*(names_in(expression) for expression in expressions(dashboard)))
    parts = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} | shown
    assert {metric.exported(name) for name, metric in (METRICS | DRIFT_METRICS).items()} <= parts


def test_legends_use_labels_that_their_expression_keeps(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            kept = {label for group in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, target["expr"]


def test_variables_and_panels_of_the_dashboard_are_consistent(dashboard: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "job_id", "method"]
    for name in LABELS:
        assert names_in(variables[name]["query"]) <= set(exported())
        assert variables[name]["query"].endswith(f", {name})")
    used = set(re.findall(r"\$\{?(\w+)\}?", " ".join(expressions(dashboard)))) - {"__rate_interval"}
    assert used <= set(variables)
    grid_positions = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(grid_positions)) == len(grid_positions)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(grid_positions)
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {"${datasource}"}


def test_every_error_code_is_a_valid_label_value() -> None:
    assert all(re.fullmatch(r"[a-z_]+", code) for code in ERROR_CODES)
