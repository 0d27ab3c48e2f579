"""Every input from every store, from the listing to decoded rows; the table of `docs/guides/sources.md` is this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from configs.schema import PromptConfig
from configs.source import SourceConfig
from pipeline.manifest import datasource, freezing
from pipeline.media import image_decoding
from pipeline.media.video import clips
from pipeline.prompts.row_options import PromptOptions
from tests.object_store import make_bucket
from tests.pipeline import inputs
from tests.pipeline.formats import web_server
from tests.pipeline.inputs import INPUTS, NOT_TO_BE_HAD, STORES, Input
from tests.pipeline.media.video.files import number_in

BUCKET = "inputs"
CELLS = [(name, store) for name in INPUTS for store in STORES if (name, store) not in NOT_TO_BE_HAD]


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    clips.close_worker()


@pytest.fixture(scope="module")
def web() -> Iterator[web_server.WebServer]:
    with web_server.running() as server:
        yield server


@pytest.fixture(scope="module")
def bucket(s3: Any) -> Any:
    return make_bucket(BUCKET)


def put(store: str, given: Input, request: pytest.FixtureRequest, folder: Path) -> str | tuple[str, ...]:
    """Write the input's files into a store; gives `source.path`. Over HTTP nothing can be listed: files are named."""
    files = given.files()
    name = folder.name
    if store == "local":
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        return str(folder)
    if store == "http":
        server = request.getfixturevalue("web")
        server.files |= {f"{name}/{path}": data for path, data in files.items()}
        urls = tuple(f"http://{server.host}/file/{name}/{path}" for path in given.named)
        return urls[0] if len(urls) == 1 else urls
    root = f"{BUCKET}/{name}"
    filesystem = request.getfixturevalue("bucket") if store == "s3" else fsspec.filesystem("memory")
    filesystem.pipe({f"{root}/{path}": data for path, data in files.items()})
    filesystem.invalidate_cache()
    return f"{store}://{root}"


def decode_all(given: Input, path: str | tuple[str, ...]) -> pa.Table:
    """Every row as the actor would get it, read by the job's own tasks."""
    source = SourceConfig(
        kind=given.kind, path=path, columns=given.columns, video={"num_frames": 2}, span_max_rows=1, check_ids=True
    )
    prompt_options = PromptOptions(
        PromptConfig(text="{ask}" if given.asks and given.kind != "text" else "{text}" if given.asks else "what?")
    )
    frozen = freezing.freeze(source, prompt_options)
    options = image_decoding.DecodeOptions.of(source, frozen.root, prompt_options)
    spans = datasource.SpanDatasource(source, frozen, tuple(prompt_options.fields()))
    return pa.concat_tables(
        image_decoding.decode_table(table, options) for task in spans.get_read_tasks(1) for table in task()
    )


def shown(table: pa.Table) -> list[tuple[str, list[Any]]]:
    """By row: what is asked, and what is seen: the colour and size of pictures, the numbers of frames."""
    rows = []
    for row in table.to_pylist():
        [message] = json.loads(row["messages"])
        asked = next(part["text"] for part in message["content"] if part["type"] == "text")
        seen: list[Any] = [(image["height"], image["width"], *image["rgb"][:3]) for image in row["images"]]
        for clip in row["videos"]:
            frames = np.frombuffer(clip["rgb"], np.uint8).reshape(clip["num_frames"], clip["height"], clip["width"], 3)
            seen.append([number_in(frame) for frame in frames])
        rows.append((asked, seen))
    return rows


def expected(given: Input) -> list[tuple[str, list[Any]]]:
    asked = inputs.ASKED if given.asks else ("what?", "what?")
    pictures: list[Any] = [(6, 8, 255, 0, 0), (2, 4, 0, 0, 255)]
    seen = [[0, 5], [100, 105]] if given.video else pictures
    return [(ask, [] if given.kind == "text" else [row]) for ask, row in zip(asked, seen, strict=True)]


@pytest.mark.parametrize(("name", "store"), CELLS)
def test_every_input_is_read_from_every_store(name: str, store: str, request: Any, tmp_path: Path) -> None:
    given = INPUTS[name]
    if given.needs:
        pytest.importorskip(given.needs)
    table = decode_all(given, put(store, given, request, tmp_path))
    assert table["error_message"].to_pylist() == ["", ""]
    assert shown(table) == expected(given)


def test_the_page_on_sources_shows_this_table() -> None:
    page = (Path(__file__).parents[3] / "docs/guides/sources.md").read_text(encoding="utf-8")
    assert inputs.markdown() in page
