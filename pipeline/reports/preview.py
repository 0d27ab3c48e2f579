"""Renders `_job/preview.html`: escaped text and re-encoded images; a security policy forbids external resources."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_ROWS = 500
MAX_IMAGES_PER_ROW = 4
THUMBNAIL_PX = 224
SIDE_PX = 2 * THUMBNAIL_PX
"""Longer side of the thumbnails, twice their displayed size."""
MAX_TEXT_CHARS = 20_000

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --quiet: #888; --good: #2a9d5c; --bad: #c0392b; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1.5rem; }}
h1 {{ font-size: 1.3rem; margin: 0; }}
.quiet {{ color: var(--quiet); font-size: .85rem; }}
article {{ display: grid; grid-template-columns: {size}px 1fr; gap: 1.2rem; padding: 1rem 0;
  border-top: 1px solid var(--line); }}
article > div {{ min-width: 0; }}
img {{ width: 100%; height: auto; border-radius: 4px; display: block; margin-bottom: .4rem; }}
h2 {{ font-size: .85rem; margin: 0; overflow-wrap: anywhere; font-weight: 600; }}
p {{ margin: .5rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
.bars {{ display: flex; align-items: flex-end; gap: 3px; height: 34px; margin-bottom: 1.1rem; }}
.bars i {{ width: 14px; min-height: 1px; background: var(--good); border-radius: 2px 2px 0 0; position: relative; }}
.bars i::after {{ content: attr(data-kept); position: absolute; top: 100%; width: 100%; text-align: center;
  font: .7rem system-ui, sans-serif; color: var(--quiet); }}
.error {{ color: var(--bad); }}
.empty {{ display: grid; place-items: center; height: 6rem; border: 1px dashed var(--line); border-radius: 4px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="quiet">{note}</div>
<div class="quiet">Bars: how many steps kept 0, 1, 2, … drafts.</div>
{articles}
</body>
</html>
"""


def render_page(
    title: str, note: str, rows: Sequence[Mapping[str, Any]], images: Mapping[str, Sequence[NDArray[np.uint8]]]
) -> str:
    """Return the HTML page of rows with `rows.result_schema`; `images` maps a sample id to RGB (height, width, 3)."""
    articles = [_article(row, images.get(row["sample_id"], ())) for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        note = f"{note}; the first {MAX_ROWS} of {len(rows)} rows are shown"
    return _PAGE.format(title=escape(title), note=escape(note), articles="\n".join(articles), size=THUMBNAIL_PX)


def _article(row: Mapping[str, Any], images: Sequence[NDArray[np.uint8]]) -> str:
    pictures = "".join(f'<img alt="" src="{thumbnail_uri(image)}">' for image in images[:MAX_IMAGES_PER_ROW])
    pictures = pictures or '<div class="empty quiet">no image</div>'
    if row["error_type"]:
        message = escape(row["error_message"][:MAX_TEXT_CHARS])
        body = f'<p class="error">{escape(row["error_type"])}: {message}</p>'
    else:
        body = f"<p>{escape(row['generated_text'].strip()[:MAX_TEXT_CHARS])}</p>{_acceptance(row)}"
    return f"<article><div>{pictures}</div><div><h2>{escape(row['sample_id'])}</h2>{body}</div></article>"


def _acceptance(row: Mapping[str, Any]) -> str:
    """Render how many steps accepted 0, 1, 2, … drafts as bars, with the row's counts as text."""
    telemetry = row["telemetry"]
    words = [escape(row["status"]), f"{row['num_generated_tokens']} tokens"]
    bars = ""
    if telemetry["num_draft_tokens"] and (steps := telemetry["num_spec_steps"]):
        words += [f"{steps} steps", f"acceptance length {telemetry['mean_acceptance_length']:.2f}"]
        histogram = telemetry["acceptance_histogram"]
        marks = (
            f'<i data-kept="{kept}" title="{count} steps kept {kept} drafts" '
            f'style="height:{100 * count / max(histogram):.0f}%"></i>'
            for kept, count in enumerate(histogram)
        )
        bars = f'<div class="bars">{"".join(marks)}</div>'
    return f'{bars}<div class="quiet">{" · ".join(words)}</div>'


def thumbnail_uri(image: NDArray[np.uint8]) -> str:
    """Return a small JPEG of an RGB image (height, width, 3) as a data URI."""
    picture = Image.fromarray(image)
    picture.thumbnail((SIDE_PX, SIDE_PX))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
