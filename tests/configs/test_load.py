"""Loading a job file: overrides, and refusals with the dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError, apply_override, load_job, read_yaml
from configs.schema import CaptionJobConfig

JOB = "configs/jobs/demo_caption.yaml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.tree.width=3", "method.tree.width: is not a known key"),
        ("method.tree.length=long", "method.tree.length: Input should be a valid integer"),
        ("method.tree.length=0", "method.tree.length: Input should be greater than or equal to 1"),
        ("method.contexts=[{kind: pruned, ratio: 2.0}]", "method.contexts.0.ratio: Input should be less than 1"),
        (
            "method.acceptance={kind: lvspec, loose: 3}",
            "method.acceptance.loose: Input should be less than or equal to 1",
        ),
        ("pool.slots=0", "pool.slots: Input should be greater than or equal to 1"),
        ("sampling.temperature=hot", "sampling.temperature: Input should be a valid number"),
        ("sampling.temperature=1e-3", "a valid number; YAML parses 1e-3 as text; write 1.0e-3"),
        ("sampling.temperature=1.5e0", "YAML parses 1.5e0 as text; write 1.5e+0"),
        ("sampling.top_k=4294967296", "sampling.top_k: Input should be less than 2147483648"),
        ("model.target.device=gpu", "model.target.device: String should match pattern"),
        ("model.drafter.device=cuda:x", "model.drafter.device: String should match pattern"),
        (
            "method.contexts=[{kind: caption, path: p, device: gpu}]",
            "method.contexts.0.device: String should match pattern",
        ),
        ("surprise=1", "surprise: is not a known key"),
        ("method.drafter.kind=model", None),
        ("model.drafter=null", "so model.drafter must name a checkpoint"),
    ],
)
def test_a_refused_override_is_named_as_it_was_written(override: str, message: str | None) -> None:
    if message is None:
        assert load_job(CaptionJobConfig, JOB, (override,)).method.drafter.kind == "model"
        return
    with pytest.raises(ConfigError) as refusal:
        load_job(CaptionJobConfig, JOB, (override,))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "may_have_images"),
    [
        ("{kind: images, path: in}", True),
        ("{kind: webdataset, path: in}", True),
        ("{kind: parquet, path: in, columns: {image: x}}", True),
        ("{kind: my.formats:odd, path: in}", True),
        ("{kind: parquet, path: in}", False),
        ("{kind: text, path: in}", False),
        ("{kind: videos, path: in}", False),
    ],
)
def test_colours_are_content_of_jobs_that_read_images(source: str, may_have_images: bool) -> None:
    def content(**more: bool) -> dict[str, object]:
        convert = tuple(f"source.{name}={str(value).lower()}" for name, value in more.items())
        section: dict[str, object] = load_job(CaptionJobConfig, JOB, (f"source={source}", *convert)).content({})[
            "source"
        ]
        return section

    assert content().get("convert_to_srgb") == (True if may_have_images else None)
    assert "convert_to_srgb" not in content(convert_to_srgb=False)


def test_every_problem_is_listed_in_one_refusal() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_job(CaptionJobConfig, JOB, ("pool.slots=0", "sampling.top_p=2"))
    assert len(str(refusal.value).splitlines()) == 2


@pytest.mark.parametrize("override", ["no equals sign", "=value", "a..b=1"])
def test_an_override_of_another_shape_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"must look like section\.field=value"):
        apply_override({}, override)


def test_an_override_through_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt is not a section"):
        apply_override({"prompt": "Describe."}, "prompt.text=x")


@pytest.mark.parametrize(
    "overrides",
    [
        ('source.path="s3://key:secret@b/x',),
        ("source.path=[s3://key:secret@b/x",),
        ("source.path=s3://key:secret@b/x", "source.path.y=1"),
        ("source.path=s3://key:secret@b/x",),
        ("source.path=s3://key:secret@b/x\a",),
    ],
)
def test_the_value_of_an_override_is_never_repeated_in_a_refusal(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"source\.path") as refused:
        load_job(CaptionJobConfig, JOB, overrides)
    assert "secret" not in str(refused.value)


def test_a_file_that_is_no_mapping_or_no_yaml_is_refused_by_name(tmp_path: Path) -> None:
    for text, message in (
        (b"- a list", "must be a mapping"),
        (b"a: 1\nb: [", r"not valid YAML: .* \(line 2, column 5\)"),
        (b"a: 2026-13-01", "not valid YAML: month must be"),
        (b"a: \x07", "not valid YAML: a character"),
        (b"[" * 5000, "nested too deeply"),
        (b"a: \xff", "it is not UTF-8"),
    ):
        file = tmp_path / "job.yaml"
        file.write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            load_job(CaptionJobConfig, file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_job(CaptionJobConfig, tmp_path / "none.yaml")


def test_the_fingerprint_changes_with_fields_that_determine_the_output_and_with_no_other() -> None:
    def mark(*overrides: str) -> str:
        return load_job(CaptionJobConfig, JOB, overrides).fingerprint({"target": "abc"})

    base = mark()
    assert mark("pool.slots=3", "sink.path=elsewhere", "job.num_cpus=2") == base
    assert len({base, mark("sampling.temperature=1.0"), mark("job.seed=1"), mark("prompt=Other.")}) == 4
    assert mark("method.drafter.kind=none") == mark("method.drafter.kind=none", "method.tree.length=9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('prompt: {text: "\\ud800 {q}"}', ": prompt.text: contains half of a surrogate pair"),
        ('sink: [{"\\udc00": 1}]', ": sink.0: contains half of a surrogate pair"),
        ('"\\udc00": 1', ": (whole file): contains half of a surrogate pair"),
        ("source: &a [*a]", "it is not valid YAML: a value contains itself"),
        ("source: 2026-01-01", ": has a value that is not text, a number, a list or a mapping"),
    ],
)
def test_values_that_json_cannot_represent_are_refused_with_a_reason(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_job(CaptionJobConfig, tmp_path / "job.yaml")
    assert message in str(refused.value)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    job = load_job(CaptionJobConfig, JOB, ('prompt="\\ud83d\\ude00 {question}"',))
    assert job.prompt is not None
    assert job.prompt.text == "\U0001f600 {question}"


def bomb(depth: int, width: int) -> str:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(30, 9), "with its aliases it has more than 100,000 values (line "),
        ("a: &a [" + "x," * 60_000 + "]\nb: *a", "with its aliases it has more than 100,000 values"),
        ("sink: {path: a}\nsource: {}\nsink: {path: b}", "a section has a key twice (line 3, column 1)"),
        ("sink: {path: a, path: b}", "a section has a key twice (line 1, column 17)"),
        ("x: " + "y" * 1_000_000, "it has 1,000,003 characters, more than 1,000,000"),
    ],
)
def test_yaml_with_unsupported_features_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_yaml(tmp_path / "job.yaml")
    assert f"it is not valid YAML: {message}" in str(refused.value)


def test_aliases_and_merge_keys_of_ordinary_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: &a {x: 1, y: 2}\nb: *a\nc: {<<: *a, y: 3}\nd: [" + "1," * 99_000 + "]")
    data = read_yaml(tmp_path / "job.yaml")
    assert (data["b"], data["c"], len(data["d"])) == ({"x": 1, "y": 2}, {"x": 1, "y": 3}, 99_000)


def test_options_against_loops_are_content_only_where_they_are_set() -> None:
    def content(*overrides: str) -> dict[str, object]:
        section: dict[str, object] = load_job(CaptionJobConfig, JOB, overrides).content({})["sampling"]
        return section

    assert not {"stop_loops", "min_loop_tokens"} & content().keys()
    assert content("sampling.stop_loops=4")["stop_loops"] == 4
    with pytest.raises(ConfigError, match=r"sampling\.stop_loops: .*a sequence that occurs once is no loop"):
        load_job(CaptionJobConfig, JOB, ("sampling.stop_loops=1",))
