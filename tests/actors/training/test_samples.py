"""Training samples of text and image targets: answers that end in EOS, and codes with or without a condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from actors.training.samples import ImageSamples, TextSamples, TrainingRow, TrainingSampleError
from configs.load import validate
from configs.training import TrainDrafterJobConfig
from decoding import Sampling
from models.heads.training.teacher import make_training_sample
from tests import toys
from tests.toys import images as image_toys

MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w7 w8"}]}]
TEXT = {"source": {"kind": "parquet", "path": "x"}, "target": {"path": "x"}, "output": {"path": "x"}}


def text_job(**training: Any) -> TrainDrafterJobConfig:
    return validate(TrainDrafterJobConfig, TEXT | {"answer_column": "a", "training": training}, "a test")


def image_job(kind: str = "text", **changes: Any) -> TrainDrafterJobConfig:
    columns = {"codes": "c", **({"features": "f"} if kind == "text" else {"label": "l"})}
    return validate(TrainDrafterJobConfig, TEXT | {"image": {"columns": columns, **changes}}, "a test")


def image_row(kind: str = "text", index: int = 0) -> TrainingRow:
    codes = np.random.default_rng(index).integers(0, image_toys.CODES, 16)
    return TrainingRow(f"s{index}", MESSAGES, (), codes=codes, condition=image_toys.condition(kind, index))


# --- texts ---------------------------------------------------------------------------------------------------------


class Plain:
    """A front end whose chat template returns the text."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render(self, messages: Any) -> str:
        return "<s> " + " ".join(part["text"] for part in messages[0]["content"] if part["type"] == "text")


@pytest.fixture
def training_samples() -> TextSamples:
    target = toys.target("llama")
    target.front_end = Plain(target.front_end)  # type: ignore[assignment]
    return TextSamples(target, text_job(max_tokens=16))


def test_an_answer_follows_its_prompt_and_ends_as_the_target_ends_it(training_samples: TextSamples) -> None:
    training_sample = training_samples.training_sample(TrainingRow("s", MESSAGES, (), answer="w20 w21"), 0)
    assert training_sample.prefix.token_ids.tolist() == [1, 7, 8, 20, 21, 2]
    assert training_sample.wanted.tolist() == [False, False, False, True, True, True]


def test_of_several_ends_the_tokenizers_own_closes_an_answer() -> None:
    target = toys.target("llama")
    target.eos_ids = frozenset({0, 2, 50})
    target.front_end = Plain(target.front_end)  # type: ignore[assignment]
    training_sample = TextSamples(target, text_job()).training_sample(TrainingRow("s", MESSAGES, (), answer="w20"), 0)
    assert training_sample.prefix.token_ids.tolist()[-1] == 2


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (TrainingRow("s", MESSAGES, (), answer=None), "missing_answer"),
        (TrainingRow("s", MESSAGES, (), answer=" \n"), "missing_answer"),
        (TrainingRow("s", MESSAGES, (), answer=" ".join(["w9"] * 13)), "too_long"),
        (TrainingRow("s", MESSAGES, (np.zeros((4, 4, 3), np.uint8),), answer="w9"), "prompt_refused"),
    ],
)
def test_a_row_without_training_tokens_has_a_reason(row: TrainingRow, code: str, training_samples: TextSamples) -> None:
    with pytest.raises(TrainingSampleError) as refused:
        training_samples.training_sample(row, 0)
    assert refused.value.code == code


def test_a_row_of_the_maximum_length_is_a_training_sample(training_samples: TextSamples) -> None:
    assert (
        training_samples.training_sample(TrainingRow("s", MESSAGES, (), answer=" ".join(["w9"] * 12)), 0).prefix.length
        == 16
    )


# --- images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", image_toys.KINDS)
def test_a_row_without_its_condition_is_the_second_lane_of_guidance(kind: str) -> None:
    target = image_toys.target(kind)
    row = image_row(kind)
    lanes = target.encode_lanes("", (), row.condition)
    assert row.codes is not None
    for share, lane in ((0.0, lanes[0]), (1.0, lanes[1])):
        training_sample = ImageSamples(target, image_job(kind, null_share=share), None).training_sample(row, 5)
        expected = make_training_sample(target, lane, row.codes.tolist(), 1)
        assert torch.equal(training_sample.prefix.embeds, expected.prefix.embeds)
        assert torch.equal(training_sample.wanted, expected.wanted)
        assert training_sample.prefix.num_padding == lane.num_padding
        if lane.padding is not None:
            assert training_sample.prefix.padding is not None
            assert training_sample.prefix.padding.tolist() == [*lane.padding.tolist(), *[False] * 16]
    assert (kind == "text") == (lanes[1].padding is not None)


def test_which_rows_lose_their_condition_follows_from_seed_and_ordinal_alone() -> None:
    target = image_toys.target("text")
    job = image_job()
    lost = [ordinal for ordinal in range(5000) if ImageSamples(target, job, None).is_null(ordinal)]
    assert lost[:6] == [28, 42, 70, 93, 105, 106]
    assert len(lost) == 476
    other = job.model_copy(update={"training": job.training.model_copy(update={"seed": 1})})
    assert [ordinal for ordinal in range(5000) if ImageSamples(target, other, None).is_null(ordinal)] != lost
    assert not ImageSamples(target, image_job(null_share=1.0), None).is_null(None), "held-out rows are never drawn for"


def test_published_training_samples_exclude_the_draft_after_the_first_code() -> None:
    target = image_toys.target("text")
    ours, published = (
        ImageSamples(target, image_job(teach_first_draft=first), None).training_sample(image_row(), None).wanted
        for first in (True, False)
    )
    assert torch.nonzero(ours & ~published).tolist() == [[image_toys.NUM_COLUMNS + 1]]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        (None, "wrong_codes"),
        (np.zeros(15, np.int64), "wrong_codes"),
        (np.full(16, image_toys.CODES), "wrong_codes"),
        (np.full(16, -1), "wrong_codes"),
    ],
)
def test_codes_that_are_no_image_are_refused(codes: Any, code: str) -> None:
    with pytest.raises(TrainingSampleError) as refused:
        ImageSamples(image_toys.target("text"), image_job(), None).training_sample(replace(image_row(), codes=codes), 0)
    assert refused.value.code == code


def test_an_image_target_that_encodes_pictures_needs_exactly_one() -> None:
    picture = np.zeros((4, 4, 3), np.uint8)
    training_samples = ImageSamples(image_toys.target("text"), image_job(), lambda image: np.arange(16))
    assert training_samples.training_sample(replace(image_row(), images=(picture,)), None).prefix.token_ids.tolist()[
        -3:
    ] == [13, 14, 15]
    for images in ((), (picture, picture)):
        with pytest.raises(TrainingSampleError, match="exactly one image"):
            training_samples.training_sample(replace(image_row(), images=images), None)


def test_features_that_the_model_does_not_take_are_refused() -> None:
    row = replace(image_row(), condition=np.zeros((2, 5), np.float32))
    with pytest.raises(TrainingSampleError) as refused:
        ImageSamples(image_toys.target("text"), image_job(), None).training_sample(row, 0)
    assert refused.value.code == "prompt_refused"


def test_a_request_has_the_rows_condition_or_its_prompt() -> None:
    training_samples = ImageSamples(image_toys.target("class"), image_job("class"), None)
    request = training_samples.request(image_row("class", 3), Sampling(max_new_tokens=16))
    assert (request.condition, request.prompt, request.images) == (3, "w7 w8", ())
