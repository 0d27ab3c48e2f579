"""Negative prompts of image jobs: rows, columns, encoding, content and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from actors.results import Stamp
from actors.synthesize import Synthesize
from configs.load import ConfigError, validate
from configs.synthesis import ImageColumnsConfig, ImagePromptConfig, ImageSamplingConfig, SynthesizeJobConfig
from decoding.types import Completion, Request
from models.inputs.content import ConditionPair
from pipeline.synthesis import rows
from pipeline.synthesis.prompts import PrepareOptions, prepare_table, wanted_columns
from tests.actors.image_fakes import FakeImageEngine, FakeImagePair, image_job
from tests.actors.test_synthesize import run
from tests.pipeline.synthesis.test_prompts import TEXT, table

NEGATIVE = {"negative_prompt": "blurry and dark"}


class Recording(FakeImagePair):
    """Records the conditions of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def engine(self, slots: int) -> FakeImageEngine:
        pair = self

        class Engine(FakeImageEngine):
            def finish(self, request: Request) -> Completion:
                pair.requests.append(request)
                return Completion(request.sample_id, (1, 2, 3, 4))

        return Engine(slots)


def options(**columns: Any) -> PrepareOptions:
    sampling = ImageSamplingConfig(negative_prompt=NEGATIVE["negative_prompt"])
    return PrepareOptions(ImagePromptConfig(text="{caption}"), ImageColumnsConfig(**columns), sampling, 7, TEXT)


def test_a_rows_own_negative_prompt_wins_and_an_empty_one_is_the_jobs() -> None:
    given = [{"caption": "a", "less": "trees"}, {"caption": "b", "less": " "}, {"caption": "c"}]
    given.append({"caption": "d", "less": 3})
    prepared = prepare_table(table(given), options(negative_prompt="less"))
    assert prepared["negative_prompt"].to_pylist() == ["trees", "blurry and dark", "blurry and dark", ""]
    assert prepared["error_type"].to_pylist() == ["", "", "", "invalid_sampling"]
    assert wanted_columns(image_job(columns={"negative_prompt": "less"}))["less"] == "columns.negative_prompt"


def test_the_unconditional_lane_of_guided_rows_gets_the_encoded_negative_prompt() -> None:
    config = image_job(sampling={**NEGATIVE, "num_images_per_prompt": 2}, columns={"guidance_scale": "s"})
    pair, schema = Recording(), rows.coded_schema([rows.NEGATIVE])
    actor = Synthesize(config, schema, Stamp("job-1", 1, "f"), load=lambda own, threads: pair)
    given = table([{"caption": "a cat", "s": 4.0}, {"caption": "a dog", "s": 1.0}])
    sampling = ImageSamplingConfig(negative_prompt=NEGATIVE["negative_prompt"])
    how = PrepareOptions(
        ImagePromptConfig(text="{caption}"), ImageColumnsConfig(guidance_scale="s"), sampling, 7, TEXT
    )
    [result] = run(actor, prepare_table(given, how))
    assert result["negative_prompt"].to_pylist() == [NEGATIVE["negative_prompt"]] * 4
    conditions = {request.sample_id: request.condition for request in pair.requests}
    for name in ("s0#0", "s0#1"):
        pair_of = conditions[name]
        assert isinstance(pair_of, ConditionPair)
        assert (pair_of.positive.tolist(), pair_of.negative.tolist()) == ([[5.0], [5.0]], [[15.0]] * 3)
    assert conditions["s1#0"].tolist() == [[5.0], [5.0]]
    assert pair.encoded == ["a cat", "blurry and dark", "a dog"]


def test_a_negative_prompt_that_cannot_be_encoded_is_the_rows_error() -> None:
    config = image_job(sampling={"negative_prompt": "REFUSE"})
    actor = Synthesize(
        config, rows.coded_schema([rows.NEGATIVE]), Stamp("job-1", 1, "f"), load=lambda own, threads: FakeImagePair()
    )
    sampling = ImageSamplingConfig(negative_prompt="REFUSE")
    how = PrepareOptions(ImagePromptConfig(text="{caption}"), ImageColumnsConfig(), sampling, 7, TEXT)
    [result] = run(actor, prepare_table(table([{"caption": "a"}]), how))
    assert result["error_type"].to_pylist() == ["prompt_too_long"]
    assert result["error_message"].to_pylist() == ["negative_prompt: the prompt has 200 tokens"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"sampling": {**NEGATIVE, "guidance_scale": 1.0}},
            r"sampling\.negative_prompt: guidance leads away from it, and sampling\.guidance_scale 1 is off",
        ),
        (
            {"columns": {"negative_prompt": "n"}, "sampling": {"guidance_scale": 0.0}},
            r"columns\.negative_prompt: guidance leads away from it, and sampling\.guidance_scale 0 is off",
        ),
        (
            {"sampling": NEGATIVE, "columns": {"label": "l"}, "prompt": None},
            r"sampling\.negative_prompt: targets with columns\.label have no text",
        ),
        (
            {"sampling": NEGATIVE, "columns": {"features": "f"}, "model": {"target": {"path": "t"}}, "prompt": None},
            r"sampling\.negative_prompt: model\.condition must name the T5 encoder",
        ),
        ({"sampling": {"negative_prompt": ""}}, r"sampling\.negative_prompt: String should have at least 1"),
    ],
)
def test_a_negative_prompt_without_an_effect_is_refused(sections: dict[str, Any], message: str) -> None:
    data = image_job().resolved() | {"sink": {"path": "out", "images": False}} | sections
    with pytest.raises(ConfigError, match=message):
        validate(SynthesizeJobConfig, data, "a test")


def test_an_encoder_beside_ready_features_encodes_negative_prompts_only() -> None:
    data = image_job().resolved() | {"columns": {"features": "f"}, "prompt": None}
    assert validate(SynthesizeJobConfig, data | {"sampling": NEGATIVE}, "a test").has_negatives
    with pytest.raises(ConfigError, match=r"model\.condition: it would encode nothing"):
        validate(SynthesizeJobConfig, data, "a test")


def test_negative_prompts_are_content_only_where_they_are_set() -> None:
    bare, own = image_job().content({}), image_job(sampling=NEGATIVE).content({})
    assert "negative_prompt" not in bare["sampling"] | bare["columns"]
    assert own["sampling"]["negative_prompt"] == NEGATIVE["negative_prompt"]
