"""Tests `prompt.template_options`: chat templates get them, unknown names are refused, old fingerprints stay."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from actors.loading import pair
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from configs.training import TrainDrafterJobConfig
from models.inputs.processing import FrontEnd
from pipeline.prompts.row_options import PromptOptions
from tests import toys
from tests.models.inputs.published_templates import TEMPLATES

QWEN = TEMPLATES["qwen 3"]
TURN = [{"role": "user", "content": "Describe it."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    toys.save("llama", folder)
    (folder / "chat_template.jinja").write_text(QWEN)
    return folder


def job(folder: Path | str, prompt: Any, **more: Any) -> CaptionJobConfig:
    data = {
        "source": {"kind": "images", "path": "in"},
        "prompt": prompt,
        "model": {"target": {"path": str(folder), "dtype": "float32", "device": "cpu"}},
        "sink": {"path": "out"},
        **more,
    }
    return validate(CaptionJobConfig, data, "job.yaml")


def prompt(**options: Any) -> dict[str, Any]:
    return {"text": "Describe it.", "template_options": options}


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_templates_render_as_in_transformers_with_these_options(options: dict[str, Any]) -> None:
    processor = copy.deepcopy(toys.processor("llama"))
    processor.chat_template = QWEN
    ours = FrontEnd(processor)
    ours.template_options = options
    expected = processor.apply_chat_template(TURN, tokenize=False, add_generation_prompt=True, **options)
    assert ours.render(TURN) == expected
    assert ("<think>" in expected) == (options == {"enable_thinking": False})


def test_loaded_pairs_render_with_the_options_of_the_job(folder: Path) -> None:
    asked = job(folder, prompt(enable_thinking=False))
    assert pair.check(asked).render(TURN).endswith("<think>\n\n</think>\n\n")
    assert pair.load(asked).render(TURN) == pair.check(asked).render(TURN)
    assert not pair.load(job(folder, prompt())).render(TURN).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["thinking", "messages", "bos_token", "add_generation_prompt"])
def test_names_that_the_template_does_not_read_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^prompt\.template_options\.{name}: the chat template of .* does not read"):
        pair.check(job(folder, prompt(**{name: False})))


@pytest.mark.parametrize(
    "options", [{"enable_thinking": [1]}, {"1x": 1}, {"a": "x" * 5000}, {f"n{i}": i for i in range(33)}, {"a b": True}]
)
def test_values_are_plain_and_few(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="template_options"):
        job("target", prompt(**options))


def test_options_determine_the_content_and_none_leave_it_as_it_was() -> None:
    plain, empty, asked = (job("target", value) for value in ("Describe it.", prompt(), prompt(enable_thinking=False)))
    assert plain.content({})["prompt"] == {"text": "Describe it.", "messages": []}
    assert plain.fingerprint({}) == empty.fingerprint({}) != asked.fingerprint({})
    assert asked.content({})["prompt"]["template_options"] == {"enable_thinking": False}
    # A recorded configuration is read back with and without the key.
    for config in (plain, asked):
        assert CaptionJobConfig.model_validate_json(json.dumps(config.resolved())) == config


def test_conversations_of_rows_take_options_and_no_prompt() -> None:
    columns = {"messages": "chat"}
    asked = job("target", {"template_options": {"enable_thinking": False}}, columns=columns)
    assert asked.template_options == {"enable_thinking": False}
    assert PromptOptions.of(asked).fields() == {"chat": "columns.messages"}
    with pytest.raises(ConfigError, match=r"give either prompt or columns\.messages"):
        job("target", prompt(enable_thinking=False), columns=columns)
    with pytest.raises(ConfigError, match=r"give either prompt or columns\.messages"):
        job("target", {"template_options": {"enable_thinking": False}})


def test_a_training_needs_a_prompt_beside_the_options() -> None:
    data = {
        "source": {"kind": "parquet", "path": "in"},
        "prompt": {"template_options": {"enable_thinking": False}},
        "answer_column": "answer",
        "target": {"path": "target"},
        "output": {"path": "out"},
    }
    with pytest.raises(ConfigError, match=r"give prompt.text or prompt.messages beside prompt.template_options"):
        validate(TrainDrafterJobConfig, data, "job.yaml")
