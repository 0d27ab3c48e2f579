"""Unknown keys, words of other programs, places of values, and text in overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from configs.hints.foreign_words import FOREIGN_WORDS
from configs.hints.keys import known_keys, unknown_key
from configs.hints.places import with_places
from configs.load import ConfigError, load_job
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig

JOB = "configs/jobs/demo_caption.yaml"
MODELS: list[type[BaseModel]] = [CaptionJobConfig, SynthesizeJobConfig, TrainDrafterJobConfig]


def test_every_word_of_another_program_leads_to_a_key_that_exists() -> None:
    keys = set(known_keys(CaptionJobConfig))
    assert len(FOREIGN_WORDS) >= 26
    assert [word for word, (key, _) in FOREIGN_WORDS.items() if key and key not in keys] == []


def test_no_word_of_another_program_is_a_key_of_the_section_that_it_leads_to() -> None:
    for word, (key, _) in FOREIGN_WORDS.items():
        assert word == word.lower().replace("-", "_")
        assert word != key.rpartition(".")[2] or word in ("quantization", "dtype", "revision")


@pytest.mark.parametrize("model", MODELS)
def test_every_key_is_near_itself_with_one_letter_missing(model: type[BaseModel]) -> None:
    for key in known_keys(model):
        parts = key.split(".")
        if len(parts[-1]) >= 8:
            hint = unknown_key(model, [*parts[:-1], parts[-1][:3] + parts[-1][4:]])
            assert "did you mean" in hint or "use " in hint, key


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("prompt=What is it: a cat?", "What is it: a cat?"),
        ("prompt=Is it #1 of all?", "Is it #1 of all?"),
        ("prompt=yes", "yes"),
        ("prompt=42", "42"),
        ("prompt={question}: what?", "{question}: what?"),
        ("prompt={question}", "{question}"),
        ("prompt={text: 'a: b'}", "a: b"),
        ("prompt='in quotes'", "in quotes"),
        ('prompt="two\\nlines"', "two\nlines"),
        ("prompt=  spaces  ", "spaces"),
        ("prompt.text=a: b", None),
    ],
)
def test_a_prompt_is_text(override: str, text: str | None) -> None:
    job = JOB if text is not None else "configs/jobs/caption_folder.yaml"
    if text is None:
        with pytest.raises(ConfigError, match="prompt is not a section but text"):
            load_job(CaptionJobConfig, job, (override,))
        return
    prompt = load_job(CaptionJobConfig, job, (override,)).prompt
    assert prompt is not None
    assert prompt.text == text


def test_values_of_fields_of_text_stay_text_and_others_do_not() -> None:
    values = (
        "job.name=2026",
        "sink.path=out: 1",
        "source.path=/data: new",
        "model.target.revision=123",
        "pool.slots=8",
    )
    job = load_job(CaptionJobConfig, JOB, values)
    assert (job.job.name, job.sink.path, job.source.path) == ("2026", "out: 1", "/data: new")
    assert (job.model.target.revision, job.pool.slots) == ("123", 8)
    lists = load_job(CaptionJobConfig, JOB, ("source.path=[a, b]", "sampling.stop=[x]", "source.id_column=null"))
    assert (lists.source.path, lists.sampling.stop, lists.source.id_column) == (("a", "b"), ("x",), None)


TEXT = """\
source:
  kind: text
  path: in

prompt: What?
pool: {slots: 4,
       max_context_tokens: 9}
method:
  contexts:
    - {kind: full}
    - {kind: caption,
       path: p}
"""


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("source.path: in cannot be listed", "({file}, line 3)"),
        ("{file}: pool.max_context_tokens: Input", "(line 7)"),
        ("{file}: (whole file): the value of pool.slots is 4", "(line 6)"),
        ("{file}: method.contexts.1.path: is bad", "(line 12)"),
        ("{file}: source.colums: is not a known key", "(line 1)"),
        ("sink.path: is required", "(command line)"),
        ("source.kind: no", "(command line)"),
        ("audit.share: no", ""),
        ("no key at all", ""),
    ],
)
def test_a_refusal_says_where_its_value_is(message: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(TEXT)
    message, place = (text.replace("{file}", str(file)) for text in (message, place))
    assert with_places(message, file, ["sink.path=x", "source.kind=csv"]) == f"{message} {place}".rstrip()


def test_a_refusal_of_a_file_that_cannot_be_read_has_no_place(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: [")
    for name in ("gone.yaml", "job.yaml"):
        assert with_places("a: b", tmp_path / name, []) == "a: b"
