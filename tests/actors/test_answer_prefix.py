"""Answers that begin with a prefix: the target continues it as `generate` continues the concatenated prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.generate import Generate
from actors.loading import pair
from actors.results import Stamp
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig, PromptConfig
from configs.training import TrainDrafterJobConfig
from models.inputs.processing import FrontEnd
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows.schemas import job_schema
from tests.actors.fakes import decoded_table, fake_job
from tests.actors.test_generate import run
from tests.models.inputs.test_chat_tokens import CORES, TEMPLATES, make_tokenizer
from zoo.text import held_out_questions
from zoo.world import listing

ZOO = Path(__file__).resolve().parents[2] / "zoo/checkpoints"
PREFIX = "Here it is:"


def job(**prompt: Any) -> CaptionJobConfig:
    return fake_job(
        source={"kind": "text", "path": "in"},
        prompt={"text": "{text}", "answer_prefix": PREFIX, **prompt},
        model={
            "target": {"path": f"{ZOO}/text_target", "dtype": "float32", "device": "cpu"},
            "drafter": {"path": f"{ZOO}/text_drafter", "dtype": "float32", "device": "cpu"},
        },
        sampling={"max_new_tokens": 16},
        pool={"slots": 4, "batch_rows": 8, "max_context_tokens": 256},
    )


def captions(config: CaptionJobConfig, texts: list[str]) -> list[dict[str, Any]]:
    options = PromptOptions.of(config)
    rows = [{"id": f"s{i}"} for i in range(len(texts))]
    table = decoded_table(rows)
    messages = [json.dumps(options.ask({"text": text}, (), ())[0][0].messages) for text in texts]
    index = table.schema.get_field_index("messages")
    table = table.set_column(index, table.schema.field(index), pa.array(messages))
    config = config.model_copy(update={"sink": config.sink.model_copy(update={"keep_tokens": True})})
    actor = Generate(config, job_schema(config), Stamp("job-1", 1, "f"), load=lambda own, threads: pair.load(own))
    return [row for result in run(actor, table) for row in result.to_pylist()]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [listing.write_prompt(*asked) for asked in held_out_questions(4, 5)]


def test_the_target_continues_the_prefix_as_generate_does(texts: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(f"{ZOO}/text_target")
    model = AutoModelForCausalLM.from_pretrained(f"{ZOO}/text_target", dtype=torch.float32)
    for row, text in zip(captions(job(), texts), texts, strict=True):
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + PREFIX
        inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        whole = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0].tolist()
        num_prompt = inputs["input_ids"].shape[1]
        assert row["token_ids"] == whole[num_prompt:]
        assert row["num_input_tokens"] == num_prompt
        after = tokenizer.decode(whole, skip_special_tokens=True)
        assert row["generated_text"].startswith(PREFIX)
        assert after.endswith(row["generated_text"])


def test_the_text_is_without_the_prefix_by_option(texts: list[str]) -> None:
    kept, bare = (captions(job(keep_answer_prefix=keeps), texts) for keeps in (True, False))
    assert [row["token_ids"] for row in kept] == [row["token_ids"] for row in bare]
    for with_prefix, without in zip(kept, bare, strict=True):
        assert with_prefix["generated_text"].removeprefix(PREFIX).strip() == without["generated_text"].strip()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prefix_is_tokenized_together_with_the_generation_prompt(core: str, template: str) -> None:
    tokenizer = make_tokenizer(core, "<s> $A", TEMPLATES[template])
    options = PromptOptions(PromptConfig(text="Describe it", answer_prefix=" a w5"))
    [asked], *_ = options.ask({}, (), ())
    front_end = FrontEnd(tokenizer)
    prompt = front_end.render(asked.messages)
    chat = [{"role": "user", "content": "Describe it"}]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + " a w5"
    assert prompt == expected
    ids = front_end.encode(prompt, ())["input_ids"][0].tolist()
    assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_a_stop_string_cuts_the_text_behind_the_prefix(texts: list[str]) -> None:
    [whole] = captions(job(), texts[:1])
    answer = whole["generated_text"].removeprefix(PREFIX)
    stop = answer.split()[1]
    config = job()
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"stop": (stop,)})})
    [cut] = captions(config, texts[:1])
    assert (cut["finish_reason"], cut["generated_text"]) == ("stop_string", PREFIX + answer[: answer.index(stop)])


@pytest.mark.parametrize("core", ["bytes", "sentence pieces"])
def test_the_space_behind_the_prefix_is_kept(core: str) -> None:
    front_end = FrontEnd(make_tokenizer(core, "<s> $A", None))
    ids = front_end.tokenizer("it it", add_special_tokens=False)["input_ids"]
    prefix = front_end.tokenizer("it", add_special_tokens=False)["input_ids"]
    assert ids[: len(prefix)] == prefix
    after = front_end.decode(ids).removeprefix(front_end.decode(prefix))
    assert front_end.decode_after("it", ids[len(prefix) :]) == after


def test_a_prefix_beside_a_structure_or_in_a_training_job_is_refused() -> None:
    data = job().resolved() | {"output": {"regex": "[a-z]+"}}
    with pytest.raises(ConfigError, match=r"prompt\.answer_prefix: the structure of output decides how a text begins"):
        validate(CaptionJobConfig, data, "a test")
    training = {
        "source": {"kind": "parquet", "path": "in"},
        "prompt": {"text": "a", "answer_prefix": "b"},
        "answer_column": "c",
        "target": {"path": "t"},
        "output": {"path": "o"},
    }
    with pytest.raises(ConfigError, match=r"prompt\.answer_prefix: the answers of a training job begin with"):
        validate(TrainDrafterJobConfig, training, "a test")


def test_a_prefix_is_content_only_where_it_is_set() -> None:
    assert fake_job().content({})["prompt"] == {"text": "Describe.", "messages": []}
    assert job().content({})["prompt"]["answer_prefix"] == PREFIX
