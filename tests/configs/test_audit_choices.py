"""An audit is refused if it means nothing: for lossless methods, unknown metrics, and budgets that no row can show."""

from __future__ import annotations

from typing import Any

import pytest

from configs.acceptance import AuditConfig
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from pipeline.run.plan_checks import check_audit
from tests.actors.fakes import fake_job

LOSSY = {
    "drafter": {"kind": "model"},
    "tree": {"kind": "chain", "length": 5},
    "acceptance": {"kind": "typical"},
    "name": "mine",
}


def job(method: dict[str, Any] | None = None, **audit: Any) -> CaptionJobConfig:
    data = fake_job().resolved()
    data["model"]["drafter"] = {"path": "somewhere"}
    data["method"] = LOSSY if method is None else method
    return validate(CaptionJobConfig, {**data, "audit": {"share": 0.1, **audit}}, "a test")


@pytest.mark.parametrize("method", [{}, {**LOSSY, "acceptance": {"kind": "exact"}}])
def test_lossless_methods_are_refused(method: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"audit: the method .* is lossless.*jobs\.verify"):
        job(method)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("share", 0.0),
        ("share", 1.5),
        ("metric", "bleu"),
        ("metric", "os.system"),
        ("metric", "a:b c"),
        ("max_loss", 0.0),
        ("max_loss", 1.0),
        ("confidence", 1.0),
        ("min_rows", 0),
        ("on_exceeded", "warn"),
    ],
)
def test_values_without_a_meaning_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"audit\.{field}"):
        job(**{field: value})


def test_the_lossless_method_differs_in_acceptance_and_name_only() -> None:
    config = job(on_exceeded="lossless")
    exact = config.lossless_method
    assert exact.verify_mode == "lossless"
    assert exact.label == "mine+exact"
    assert exact.model_copy(update={"acceptance": config.method.acceptance, "name": "mine"}) == config.method


def test_budgets_may_change_between_attempts_and_share_and_metric_may_not() -> None:
    content = job().content({})
    assert job(max_loss=0.1, on_exceeded="lossless", confidence=0.9, min_rows=5).content({}) == content
    assert job(share=0.2).content({}) != content
    assert job(metric="edit").content({}) != content
    assert "audit" not in fake_job().content({}), "older outputs have the same content"


def test_a_budget_that_min_rows_cannot_show_is_refused_with_the_number_that_can() -> None:
    with pytest.raises(ConfigError, match=r"audit\.min_rows: 100 rows cannot show a loss of at most 0\.01") as error:
        check_audit(AuditConfig(share=0.1, max_loss=0.01, min_rows=100))
    fewest = int(str(error.value).rpartition(" ")[2].replace(",", ""))
    check_audit(AuditConfig(share=0.1, max_loss=0.01, min_rows=fewest))
    with pytest.raises(ConfigError):
        check_audit(AuditConfig(share=0.1, max_loss=0.01, min_rows=fewest - 1))
