"""Key numbers of the report page."""

from __future__ import annotations

from configs.acceptance import AuditConfig
from pipeline.reports.loss import Losses, loss_interval
from pipeline.reports.report import render
from tests.pipeline.reports.synthetic_job import live_job, report_of, tables


def test_the_loss_of_audited_rows_has_a_tile_with_its_interval_and_the_budget() -> None:
    live = live_job(tables(100))
    assert "loss beside plain decoding" not in render(report_of(live))
    live.summary.audit, live.summary.losses = AuditConfig(share=0.5, metric="edit", max_loss=0.2), Losses(40, 5.0)
    low, high = loss_interval(40, 5.0, 0.95)
    page = render(report_of(live))
    assert "<b>0.125</b><span>loss beside plain decoding</span>" in page
    assert f"{low:.3f} to {high:.3f}, edit, 40 audited rows; budget 0.2" in page
    live.summary.losses = Losses()
    assert "loss beside plain decoding" not in render(report_of(live))
