"""Key numbers, order and headline of the report page."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from configs.acceptance import AuditConfig
from pipeline.reports.gallery import MAX_REPLICAS, Gallery, Shown, make_gallery
from pipeline.reports.loss import Losses, loss_interval
from pipeline.reports.outcome import judge
from pipeline.reports.report import render
from pipeline.rows.schemas import result_schema
from tests.pipeline.reports.synthetic_job import live_job, report_of, result_row, tables


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


def failed_job() -> tuple[Any, list[dict[str, Any]]]:
    rows = [result_row(n, 0.7, random.Random(n), "photos/a.parquet", "image_too_large") for n in range(30)]
    live = live_job([pa.Table.from_pylist(rows, schema=result_schema())])
    live.summary.verdict = judge(30, {"image_too_large": 30}, {"image_too_large": "it has <b>9</b> pixels"}, 0.1)
    return live, rows


def test_a_failed_job_looks_failed_and_names_the_commonest_error_and_its_remedy() -> None:
    live, rows = failed_job()
    page = render(report_of(live, make_gallery(rows), state="failed"))
    [headline] = [part.partition("</div>")[0] for part in page.split('<div class="failed" role="alert">')[1:]]
    assert "<h2>The job failed</h2>" in headline
    assert "most often with image_too_large (30)" in headline
    assert "it has &lt;b&gt;9&lt;/b&gt; pixels" in headline
    assert "raise source.max_image_bytes or source.max_image_pixels" in headline
    assert page.index('class="failed"') < page.index('class="tiles"')


def test_a_job_that_ended_before_all_rows_has_a_headline_and_a_running_one_has_none() -> None:
    live, rows = failed_job()
    live.summary.verdict = judge(0, {}, {}, None)
    page = render(report_of(live, make_gallery(rows), state="failed before all rows were done"))
    assert "<h2>The job failed before all rows were done</h2>" in page
    assert "Most often with image_too_large (30 rows); raise source.max_image_bytes" in page
    for state in ("running", "done"):
        assert 'class="failed"' not in render(report_of(live_job(tables(100)), state=state))


def test_samples_come_first_and_empty_sections_do_not_appear() -> None:
    full = render(report_of(live_job(tables(600))))
    places = [full.index(f'<section id="{name}">') for name in ("gallery", "errors", "rates", "acceptance", "time")]
    assert places == sorted(places)
    assert full.index('class="tiles"') < places[0]
    plain = live_job(tables(100, seed=1))
    plain.summary.num_draft_tokens, plain.summary.errors_by_type = 0, {}
    page = render(report_of(plain, Gallery([])))
    for name in ("gallery", "errors"):
        assert f'<section id="{name}">' not in page
        assert f'href="#{name}"' not in page
    assert "no drafts" not in page
    assert "no data yet" not in page
    assert "<figcaption>Share of steps" not in page


def test_prompts_are_shown_on_samples_and_escaped() -> None:
    [table] = list(tables(50))[:1]

    def prompts(rows: Sequence[Any]) -> Iterator[Shown]:
        for row in rows:
            yield row["sample_id"], [], "What is <i>this</i>?" + "x" * 10_000

    page = render(report_of(live_job(tables(100)), make_gallery(table.to_pylist()[:2], prompts)))
    assert page.count('<p class="prompt" dir="auto">What is &lt;i&gt;this&lt;/i&gt;?xxx') == 2
    assert "x" * 700 not in page


def test_images_of_one_prompt_are_one_item_with_seed_and_guidance() -> None:
    rows = []
    for number in range(12):
        row = result_row(number, 0.7, random.Random(0), "prompts.csv", "engine_died" if number == 5 else "")
        prompt, replica = divmod(number, 4)
        row |= {"sample_id": f"p#{prompt}#{replica}", "prompt_id": f"p#{prompt}", "replica": replica, "label": None}
        row |= {"prompt": f"boat {prompt}", "seed": 17, "guidance_scale": 7.5}
        del row["generated_text"]
        rows.append(row)

    def images(rows: Sequence[Any]) -> Iterator[Shown]:
        for row in rows:
            if not row["error_type"]:
                yield row["sample_id"], [np.zeros((8, 8, 3), np.uint8)]

    gallery = make_gallery(rows, images)
    assert [(item.sample_id, len(item.images), item.prompt) for item in gallery.items] == [
        ("p#0", 4, "boat 0"),
        ("p#1#0", 1, "boat 1"),
        ("p#1#1", 0, "boat 1"),
        ("p#1", 2, "boat 1"),
        ("p#2", 4, "boat 2"),
    ]
    page = render(report_of(live_job(tables(100)), gallery))
    assert page.count("<figcaption>#3 · seed 17 · guidance 7.5</figcaption>") == 3
    many = [dict(rows[0], sample_id=f"p#0#{n}", replica=n) for n in range(MAX_REPLICAS + 3)]
    assert [len(item.lines) for item in make_gallery(many).items] == [MAX_REPLICAS, 3]
