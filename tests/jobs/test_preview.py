"""The preview page shows the job's output and executes nothing from the data."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
from PIL import Image

from pipeline.reports.preview import MAX_ROWS, render_page, thumbnail_uri

HOSTILE = "</p><script>alert(1)</script><img src=x onerror=alert(2)> \" ' & {title} \x00"


class Tags(HTMLParser):
    """Collects tags with their attributes, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def row(sample_id: str = "a", **values: Any) -> dict[str, Any]:
    telemetry = {
        "num_spec_steps": 3,
        "num_draft_tokens": 15,
        "mean_acceptance_length": 2.5,
        "acceptance_histogram": [1, 0, 2],
    }
    return {
        "sample_id": sample_id,
        "status": "success",
        "error_type": "",
        "error_message": "",
        "generated_text": "A red circle.",
        "num_generated_tokens": 9,
        "telemetry": telemetry,
        **values,
    }


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


def test_hostile_text_stays_text_everywhere() -> None:
    rows = [
        row(HOSTILE, generated_text=HOSTILE, status=HOSTILE),
        row("b", error_type=HOSTILE, error_message=HOSTILE),
    ]
    found = parse(render_page(HOSTILE, HOSTILE, rows, {}))
    assert {tag for tag, _ in found.tags} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "div", "article", "p", "i"
    }  # fmt: skip
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert found.text.count("<script>alert(1)</script>") >= 6


def test_the_page_may_load_nothing_but_its_own_images() -> None:
    found = parse(render_page("t", "n", [row()], {"a": [np.zeros((4, 4, 3), np.uint8)]}))
    policies = [attributes["content"] for tag, attributes in found.tags if "http-equiv" in attributes and tag == "meta"]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    sources = [attributes["src"] for tag, attributes in found.tags if tag == "img"]
    assert len(sources) == 1
    assert str(sources[0]).startswith("data:image/jpeg;base64,")


def test_a_thumbnail_is_the_picture_made_small() -> None:
    picture = np.zeros((1000, 500, 3), np.uint8)
    picture[:, :, 0] = 200
    data = base64.b64decode(thumbnail_uri(picture).split(",", 1)[1])
    with Image.open(io.BytesIO(data)) as small:
        assert small.size == (224, 448)
        red, green, _ = small.convert("RGB").getpixel((100, 200))  # type: ignore[misc]
    assert abs(red - 200) < 8
    assert green < 8


def test_text_acceptance_and_errors_are_shown_per_sample() -> None:
    page = render_page("job", "2 samples", [row(), row("b", error_type="broken_image", error_message="cut short")], {})
    text = re.sub(r"\s+", " ", parse(page).text)
    assert "no imageaA red circle.success" in text
    assert "success · 9 tokens · 3 steps · acceptance length 2.50" in text
    assert "broken_image: cut short" in text
    assert page.count("<i data-kept=") == 3
    assert 'title="2 steps kept 2 drafts" style="height:100%"' in page


def test_a_long_list_is_marked_as_truncated() -> None:
    page = render_page("job", "many", [row(f"s{index}") for index in range(MAX_ROWS + 5)], {})
    assert page.count("<article>") == MAX_ROWS
    assert f"the first {MAX_ROWS} of {MAX_ROWS + 5} rows are shown" in page


def test_plain_decoding_has_no_acceptance_to_show() -> None:
    plain = row(telemetry={"num_spec_steps": 8, "num_draft_tokens": 0, "acceptance_histogram": [8]})
    assert "acceptance length" not in render_page("job", "", [plain], {})
