"""Files that users and checkpoints name are read within bounds, and only if they are regular."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError, load_job
from configs.output import ExportJobConfig, OutputConfig
from configs.schema import CaptionJobConfig
from configs.yaml_file import MAX_YAML_CHARS, read_yaml
from files.local import OutsideRoots, open_regular, read_regular
from files.strict_json import MAX_DEPTH, JsonError, parse_json, parse_object, walk
from models.loading.vocabulary import VocabularyError, read_tokens


def not_regular(folder: Path) -> list[str]:
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(folder / "fifo")
    (folder / "folder").mkdir()
    return [*map(str, (folder / "fifo", folder / "link", folder / "folder")), "/dev/zero", "/proc/self/environ"]


def test_a_file_that_is_not_regular_is_refused_without_waiting(tmp_path: Path) -> None:
    for path in not_regular(tmp_path):
        with pytest.raises(OSError, match=r"no regular file|Is a directory"):
            open_regular(path)
        with pytest.raises(OSError, match=r"no regular file|Is a directory"):
            read_regular(path, 10)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path / "a", 4)


def test_a_link_out_of_the_roots_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").touch()
    (tmp_path / "in/link").symlink_to(tmp_path / "secret")
    with pytest.raises(OutsideRoots):
        open_regular(tmp_path / "in/link", (str(tmp_path / "in"),))
    with open_regular(tmp_path / "in/link", (str(tmp_path),)) as file:
        assert file.read() == b""


@pytest.mark.parametrize("model", [CaptionJobConfig, ExportJobConfig])
def test_a_job_file_that_is_not_regular_is_refused(model: Any, tmp_path: Path) -> None:
    for path in not_regular(tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read: (it is no regular file|Is a directory)"):
            load_job(model, path)


def test_a_job_file_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    with (tmp_path / "job.yaml").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ConfigError, match=f"cannot be read: it has more than {4 * MAX_YAML_CHARS:,} bytes"):
        read_yaml(tmp_path / "job.yaml")


def test_a_schema_file_that_is_not_regular_is_refused(tmp_path: Path) -> None:
    for path in not_regular(tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read: (it is no regular file|Is a directory)"):
            OutputConfig(json_schema=path)  # type: ignore[arg-type]


def test_a_vocabulary_that_is_not_regular_is_refused(tmp_path: Path) -> None:
    for path in not_regular(tmp_path):
        with pytest.raises(VocabularyError, match=r"cannot be read: (it is no regular file|Is a directory)"):
            read_tokens(path)


# --- JSON ----------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@given(JSON)
def test_strict_json_has_the_values_of_json(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == json.loads(json.dumps(value))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_refusal(data: bytes) -> None:
    with suppress(JsonError):
        assert parse_json(data) == json.loads(data)


def test_depth_is_bounded_at_its_edge() -> None:
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(JsonError, match=f"more than {MAX_DEPTH} levels"):
        parse_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


def test_values_are_bounded_at_their_edge() -> None:
    assert parse_json(b"[1,1,1]", 3) == [1, 1, 1]
    with pytest.raises(JsonError, match="more than 2 values"):
        parse_json(b"[1,1,1]", 2)


@pytest.mark.parametrize("text", ["1", "null", "[]", '"a"'])
def test_an_object_is_expected(text: str) -> None:
    with pytest.raises(JsonError, match="no JSON object"):
        parse_object(text.encode())


def test_objects_are_found_with_their_paths() -> None:
    value = {"a": {"b": [1, {"c": {}}]}, "d": 1}
    assert [path for path, _ in walk(value)] == [(), ("a",), ("a", "b", "1"), ("a", "b", "1", "c")]
