"""Renders `_job/report.html`: one page that loads nothing, in which all texts of the data are escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from pipeline.reports import charts, loss
from pipeline.reports.charts import Point
from pipeline.reports.gallery import Gallery
from pipeline.reports.live import Live, windows_of
from pipeline.reports.outcome import DEFAULT_ADVICE, most_common
from pipeline.reports.summary import CONVENTION, Summary
from pipeline.rows.schemas import ERROR_ADVICE, ERROR_CODES

FOLDER = Path(__file__).with_name("templates")
MAX_CONFIG_CHARS = 100_000
MAX_ERROR_ROWS = 64
# Controls except tab and line feed, and the embeddings, overrides and isolates of bidirectional text.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


@dataclass(frozen=True)
class JobReport:
    """Content of the page. `summary` counts the whole output if the job is done, and otherwise this attempt so far."""

    title: str
    output: str
    state: str
    """`running`, `done`, `failed` if too few rows of a finished job succeeded, or why the job ended before."""
    updated_at: str
    summary: Summary
    total_rows: int | None
    live: Live | None
    """State of this attempt; None if it computed no rows."""
    gallery: Gallery
    gallery_note: str = ""
    job_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)


def render(report: JobReport) -> str:
    """Return the HTML page."""
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    text = yaml.safe_dump(dict(report.config), sort_keys=False, allow_unicode=True)
    return _TEMPLATE.render(
        report=report,
        summary=report.summary,
        tiles=_tiles(report),
        lines=[line for line in report.summary.lines() if not line[0].startswith("  position")],
        charts=_charts(report),
        errors=_errors(report),
        sources=report.live.watch.table() if report.live else [],
        drifts=[drift.text() for drift in report.live.drifts] if report.live else [],
        config=text[:MAX_CONFIG_CHARS],
        versions=_flat(report.versions),
        convention=CONVENTION,
        headline=_headline(report),
        statuses=sorted({item.status for item in report.gallery.items if item.status}),
        codes=sorted({item.error_type for item in report.gallery.items if item.error_type}),
        spark=charts.sparkline,
        style=Markup(style),
        script=Markup(script),
        policy=page_policy(style, script),
    )


def page_policy(style: str, script: str = "") -> str:
    """Return the content security policy of a page with this inline style and script, which may load nothing."""
    scripts = f"script-src '{_hash(script)}'; " if script else ""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; {scripts}base-uri 'none'; form-action 'none'"
    )


def visible(value: Any) -> Any:
    """Return a text with control and direction characters replaced by their code points, other values unchanged."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _HIDDEN.sub(lambda match: f"\u27e8U+{ord(match.group()):04X}\u27e9", value)


def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(FOLDER)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        finalize=visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    return environment


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def duration(seconds: float) -> str:
    """Return a time such as 4.2 s, 3 min 20 s or 5 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _headline(report: JobReport) -> tuple[str, str]:
    """Return why a job failed, as a headline and an explanation; empty if it did not."""
    reason = report.summary.verdict.reason
    if report.state == "failed" or (reason and report.state != "running"):
        return "The job failed", reason
    if report.state not in ("running", "done"):
        return f"The job {report.state}", reason or _commonest_error(report)
    return "", reason


def _commonest_error(report: JobReport) -> str:
    """Return the most frequent error of the rows so far, with what to do; empty without one."""
    code, count = most_common(report.summary.errors_by_type)
    return f"Most often with {code} ({count:,} rows); {ERROR_ADVICE.get(code, DEFAULT_ADVICE)}" if code else ""


def _tiles(report: JobReport) -> list[tuple[str, str, str]]:
    """Return the key numbers as (label, value, note)."""
    summary = report.summary
    is_finished = report.state in ("done", "failed")
    done = f"of {report.total_rows:,} in this attempt" if report.total_rows and not is_finished else ""
    share = f"{summary.num_errors / summary.num_samples:.2%} of all rows" if summary.num_samples else ""
    tiles = [
        ("rows", f"{summary.num_samples:,}", done),
        ("rows per second", f"{summary.samples_per_s:,.2f}", f"wall time {duration(summary.wall_s)}"),
        ("tokens per second", f"{summary.tokens_per_s:,.0f}", f"{summary.num_generated_tokens:,} tokens"),
        ("acceptance length", f"{summary.mean_acceptance_length:.2f}", f"{summary.method}, {summary.verify_mode}"),
        ("errors", f"{summary.num_errors:,}", share),
    ]
    if summary.audit is not None and summary.losses.mean is not None:
        figures = loss.to_json(summary.audit, summary.losses)
        budget = "" if summary.audit.max_loss is None else f"; budget {summary.audit.max_loss:g}"
        note = f"{figures['low']:.3f} to {figures['high']:.3f}, {summary.audit.metric}, "
        rows = f"{summary.losses.num_rows:,} audited rows"
        tiles.append(("loss beside plain decoding", f"{summary.losses.mean:.3f}", note + rows + budget))
    return tiles


def _charts(report: JobReport) -> dict[str, Markup]:
    summary = report.summary
    steps = sum(summary.acceptance_histogram)
    positions = [
        (f"{depth}", share, f"position {depth}: accepted in {share:.1%} of steps")
        for depth, share in enumerate(summary.acceptance_by_position, start=1)
    ]
    # Of the steps that accepted all earlier positions, the share that accepted this one too.
    reached = [1.0, *summary.acceptance_by_position]
    conditional = [
        (
            f"{depth}",
            reached[depth] / reached[depth - 1],
            f"position {depth}: accepted in {reached[depth] / reached[depth - 1]:.1%} of the steps that reached it",
        )
        for depth in range(1, len(reached))
        if reached[depth - 1]
    ]
    accepted = [
        (f"{depth}", 100 * count / steps, f"{count:,} steps ({count / steps:.1%}) accepted {depth} drafts")
        for depth, count in enumerate(summary.acceptance_histogram)
        if steps
    ]
    drawn: dict[str, Markup] = {}
    if summary.num_draft_tokens:
        drawn = {
            "positions": charts.bar_chart(positions, "share of steps that accepted each position", "position"),
            "conditional": charts.bar_chart(conditional, "acceptance of each position, if reached", "position"),
            "accepted": charts.bar_chart(accepted, "percent of steps by number of accepted drafts", "accepted drafts"),
        }
    if summary.engine_s:
        drawn["engine"] = _engine_time(summary)
    if summary.waits.total_s:
        drawn["waits"] = _waits(summary)
    over_time = _over_time(report.live) if report.live and report.live.history.windows else {}
    if not summary.num_draft_tokens:
        over_time.pop("length", None)
    return drawn | over_time


def _over_time(live: Live) -> dict[str, Markup]:
    windows = windows_of(live.history)
    divisor, unit = next(
        (d, u)
        for d, u, limit in ((1, "s", 300), (60, "min", 18_000), (3600, "h", float("inf")))
        if not windows or windows[-1]["end_s"] <= limit
    )
    width = live.history.width_s
    rates: dict[str, list[Point]] = {"rows": [], "tokens": [], "length": []}
    for window in windows:
        x, at = window["end_s"] / divisor, f"up to {window['end_s'] / divisor:,.3g} {unit}"
        for name in ("rows", "tokens"):
            rate = window[f"num_{name}"] / width
            rates[name].append(Point(x, rate, f"{at}: {rate:,.1f} {name}/s, {window['num_errors']:,} errors"))
        length = 1 + window["num_accepted"] / window["num_steps"] if window["num_steps"] else None
        rates["length"].append(
            Point(x, length, f"{at}: {length:.2f} over {window['num_rows']:,} rows" if length else "")
        )
    return {
        "rows": charts.line_chart(rates["rows"], "rows per second over time", unit),
        "tokens": charts.line_chart(rates["tokens"], "tokens per second over time", unit),
        "length": charts.line_chart(rates["length"], "acceptance length over time", unit, zero=False),
    }


def _engine_time(summary: Summary) -> Markup:
    total_ms = summary.engine_s * 1000
    phases = (("prefill", summary.prefill_ms), ("draft", summary.draft_ms), ("verify", summary.verify_ms))
    shares = [(name, ms / total_ms, f"{ms / total_ms:.1%} · {duration(ms / 1000)}") for name, ms in phases]
    return charts.share_bar(shares, "engine time by phase")


def _waits(summary: Summary) -> Markup:
    waits = summary.waits
    busy_s = max(0.0, waits.total_s - waits.idle_s - waits.queued_s)
    parts = (
        ("engines work, rows wait for a slot", waits.queued_s),
        ("engines work, no row waits", busy_s),
        ("engines wait for input", waits.idle_s),
    )
    shares = [(name, s / waits.total_s, f"{s / waits.total_s:.1%} · {duration(s)}") for name, s in parts]
    return charts.share_bar(shares, "time of all engines by what they wait for")


def _errors(report: JobReport) -> list[dict[str, Any]]:
    examples = report.live.errors.by_code if report.live else {}
    by_code = sorted(report.summary.errors_by_type.items(), key=lambda entry: (-entry[1], entry[0]))
    return [
        {
            "code": code,
            "count": count,
            "share": count / max(1, report.summary.num_samples),
            "meaning": ERROR_CODES.get(code, ""),
            "examples": examples.get(code, []),
        }
        for code, count in by_code[:MAX_ERROR_ROWS]
    ]


def _flat(values: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """Return nested values as (dotted name, text)."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += [(f"{name}.{inner}", text) for inner, text in _flat(value)]
        else:
            pairs.append((name, str(value)))
    return pairs


def template(name: str) -> jinja2.Template:
    """Return a template of this folder, which escapes all values."""
    return _environment().get_template(name)


_TEMPLATE = template("report.html.j2")
