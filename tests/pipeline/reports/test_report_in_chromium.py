"""The report in a headless Chromium: it opens fast, sorts, fits phones, and texts of the data stay texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.pool import AcceptanceDropConfig
from docgen.screenshot import BROWSER, BROWSERS
from pipeline.reports.gallery import MAX_ROWS, MAX_ROWS_LIMITED, make_gallery
from pipeline.reports.report import JobReport, render
from pipeline.rows.schemas import result_schema
from tests.pipeline.reports.synthetic_job import live_job, picture, pictures, report_of, result_row, tables

pytestmark = pytest.mark.slow

MARK = "document.documentElement.dataset.ran=1"
HOSTILE = (
    f"</p></script><script>{MARK}</script><img src=x onerror='{MARK}'><svg onload={MARK}>"
    f"<a href='javascript:{MARK}'>x</a><iframe srcdoc='<script>top.{MARK}</script>'></iframe>"
    f"\" onmouseover='{MARK}' autofocus onfocus='{MARK}' x=\"{{{{ 7*7 }}}}{{% raw %}}"
    "<style>*{display:none}</style><base href=//evil.example><!-- \x00\x01\x1b[31m\x9b\ud800\u202eevil\u2066\u200f"
    "\U0001f469\u200d\U0001f680 \u05e9\u05dc\u05d5\u05dd ]]>"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip(f"no Chromium is installed: none of {', '.join(BROWSERS)} is in PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with playwright.sync_playwright() as session:
        running = session.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def page_of_10_000_rows() -> str:
    live = live_job(tables(10_000), AcceptanceDropConfig())
    rows = [row for table in tables(1_000) for row in table.to_pylist()][:MAX_ROWS]
    return render(
        report_of(live, make_gallery(rows, pictures), config={"source": {"kind": "parquet"}}, versions={"torch": "1"})
    )


def opened(browser: Any, path: Path, text: str, **options: Any) -> tuple[Any, list[str]]:
    """Open a page from a file; return it and the addresses that it requests."""
    path.write_bytes(text.encode("utf-8", "replace"))
    page = browser.new_context(**options).new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    return page, requests


def structure(page: Any) -> list[str]:
    """Every element of a page in order, with its attributes' names, and the addresses and handlers among the values."""
    overflowing: list[str] = page.evaluate(
        """() => Array.from(document.querySelectorAll("*"), (one) => [one.tagName, ...Array.from(one.attributes, (a) =>
        /^(on|href$|src$|style$|srcdoc$)/.test(a.name) ? a.name + "=" + a.value.slice(0, 40) : a.name)].join(" "))"""
    )
    return overflowing


def has_run(page: Any) -> bool:
    page.mouse.move(300, 500)
    page.keyboard.press("Tab")
    return bool(page.evaluate("document.documentElement.dataset.ran !== undefined"))


def report_with(text: str) -> JobReport:
    """A report in which every text of the data is `text`."""
    import random

    import pyarrow as pa

    rows = [result_row(number, 0.7, random.Random(number), text + "/a") for number in range(40)]
    rows += [result_row(number, 0.7, random.Random(number), text + "/a", error=text) for number in range(40, 44)]
    for number, row in enumerate(rows):
        row |= {"sample_id": f"{text}{number}", "method": text}
        if not row["error_type"]:
            row["generated_text"] = text
    bound = AcceptanceDropConfig(min_rows=16)
    live = live_job([pa.Table.from_pylist([row], schema=result_schema()) for row in _encodable(rows)], bound)
    live.summary.job_id = live.summary.method = live.summary.verify_mode = text
    live.summary.drifts = [text]
    gallery = make_gallery(
        [row | {"audit_text": text, "audit_loss": 0.5} for row in rows],
        lambda _: iter([(rows[0]["sample_id"], [picture(0, 32)])]),
    )
    return report_of(live, gallery, state=text, config={text: [text]}, versions={text: {text: text}})


def _encodable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows without lone surrogates, which Arrow refuses."""
    return [
        {
            name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def test_the_report_of_10_000_rows_opens_within_two_seconds_and_has_at_most_5_mb(
    browser: Any, page_of_10_000_rows: str, tmp_path: Path
) -> None:
    assert len(page_of_10_000_rows.encode()) <= 5_000_000
    page, _ = opened(browser, tmp_path / "report.html", page_of_10_000_rows)
    took_ms = []
    for _ in range(3):
        page.reload()
        took_ms.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert 0 < min(took_ms) < 2000
    assert page.locator("article").count() == MAX_ROWS
    assert page.locator("svg.chart").count() == 6
    assert page.evaluate("Array.from(document.images).filter((one) => one.complete && !one.naturalWidth).length") == 0
    assert page.evaluate("document.images[0].naturalWidth") == 320


def test_the_report_sends_no_request_and_logs_no_error(browser: Any, page_of_10_000_rows: str, tmp_path: Path) -> None:
    page, requests = opened(browser, tmp_path / "report.html", page_of_10_000_rows)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.reload()
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    assert problems == []
    assert {url for url in requests if not url.startswith("data:image/jpeg;base64,")} == {
        (tmp_path / "report.html").as_uri()
    }


def test_a_click_sorts_a_table_and_a_second_click_reverses_it(
    browser: Any, page_of_10_000_rows: str, tmp_path: Path
) -> None:
    page, _ = opened(browser, tmp_path / "report.html", page_of_10_000_rows)
    table = page.locator("#acceptance table.sortable")

    def column(index: int) -> list[str]:
        texts: list[str] = table.locator(f"tbody tr td:nth-child({index})").all_inner_texts()
        return texts

    def click(name: str) -> None:
        table.get_by_role("button", name=name, exact=True).click()

    names, rows = column(1), column(3)
    assert sorted(names) == ["all sources", "charts", "photos", "scans"]
    click("rows")
    numbers = [int(text.replace(",", "")) for text in column(3)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 4
    click("rows")
    assert [int(text.replace(",", "")) for text in column(3)] == numbers[::-1]
    assert sorted(zip(names, rows)) == sorted(zip(column(1), column(3)))
    click("source")
    assert column(1) == sorted(names)
    headings = table.locator("th")
    assert [headings.nth(index).get_attribute("aria-sort") for index in range(3)] == ["ascending", "none", "none"]


def test_filters_by_status_error_and_text_hide_the_other_samples(browser: Any, tmp_path: Path) -> None:
    import random

    rows = [result_row(number, 0.7, random.Random(number), "a") for number in range(6)]
    rows += [result_row(number, 0.7, random.Random(number), "a", "broken_image") for number in range(6, 9)]
    rows += [result_row(9, 0.7, random.Random(9), "a", "row_timeout")]
    rows[0] |= {"generated_text": "A Zebra.", "status": "truncated"}
    page, _ = opened(browser, tmp_path / "report.html", render(report_of(live_job(tables(100)), make_gallery(rows))))

    def shown() -> int:
        return int(page.locator("#gallery article:visible").count())

    field = page.locator("#filters [data-filter=text]")
    assert shown() == 10
    field.fill("zebra")
    assert (shown(), page.locator("#filters [role=status]").inner_text()) == (1, "1 of 10 shown")
    field.fill("")
    page.locator("#filters [data-filter=error]").select_option("broken_image")
    assert shown() == 3
    page.locator("#filters [data-filter=status]").select_option("truncated")
    assert shown() == 0
    page.locator("#filters [data-filter=error]").select_option("")
    assert shown() == 1


@pytest.mark.parametrize("width_px", [320, 390, 1280])
def test_the_report_fits_the_width_of_a_phone_and_of_a_desktop(
    browser: Any, page_of_10_000_rows: str, tmp_path: Path, width_px: int
) -> None:
    size = {"width": width_px, "height": 800}
    page, _ = opened(browser, tmp_path / "report.html", page_of_10_000_rows, viewport=size)
    assert page.evaluate("document.documentElement.scrollWidth") <= width_px


def test_dark_mode_follows_the_system(browser: Any, page_of_10_000_rows: str, tmp_path: Path) -> None:
    def light_of(scheme: str) -> tuple[int, int]:
        page, _ = opened(browser, tmp_path / "report.html", page_of_10_000_rows, color_scheme=scheme)
        script = "(name) => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3).map(Number)"
        ground, ink = (sum(page.evaluate(script, name)) for name in ("backgroundColor", "color"))
        return ground, ink

    ground, ink = light_of("light")
    assert ground > ink + 450
    ground, ink = light_of("dark")
    assert ink > ground + 450


def test_hostile_texts_run_nothing_and_add_no_element(browser: Any, tmp_path: Path) -> None:
    harmless, _ = opened(browser, tmp_path / "harmless.html", render(report_with("text")))
    page, requests = opened(browser, tmp_path / "hostile.html", render(report_with(HOSTILE)))
    assert not has_run(page)
    assert structure(page) == structure(harmless)
    assert all(url.startswith(("file:", "data:image/jpeg")) for url in requests)
    shown = page.locator("article p.text").first.inner_text()
    assert f"<script>{MARK}</script>" in shown
    assert "{{ 7*7 }}" in shown
    for mark in (
        "\u27e8U+0000\u27e9",
        "\u27e8U+202E\u27e9",
        "\u27e8U+2066\u27e9",
        "\u27e8U+D800\u27e9",
        "\U0001f469\u200d\U0001f680",
        "\u05e9\u05dc",
    ):
        assert mark in shown
    assert not set("\x00\x01\x1b\x9b\u202e\u2066\u200f") & set(page.content())


def test_rows_of_1_mb_are_cut_and_leave_the_page_within_its_bound(browser: Any, tmp_path: Path) -> None:
    import random

    rows = [result_row(number, 0.7, random.Random(0), "a/b") for number in range(MAX_ROWS_LIMITED)]
    for row in rows:
        row["generated_text"] = row["sample_id"] = '<\u0634"' * 350_000 + row["sample_id"]
    gallery = make_gallery(rows, pictures)
    assert 100 < len(gallery.items) < MAX_ROWS_LIMITED
    assert gallery.num_left_out == MAX_ROWS_LIMITED - len(gallery.items)
    text = render(report_of(live_job(tables(100)), gallery))
    assert len(text.encode()) <= 5_000_000
    page, _ = opened(browser, tmp_path / "report.html", text)
    assert page.locator("article").count() == len(gallery.items)
