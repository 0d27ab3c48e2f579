"""Tests which token represents the masks of a block drafter that a training job creates."""

from __future__ import annotations

import pytest
import torch

from actors.training.learner import fresh_head
from configs.training import TrainDrafterJobConfig
from configs.yaml_file import ConfigError
from models.heads.training.block_loss import BlockTask
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.pair import CHECKPOINTS


def job(**head: object) -> TrainDrafterJobConfig:
    return TrainDrafterJobConfig.model_validate(
        {
            "source": {"kind": "parquet", "path": "in"},
            "prompt": "x",
            "answer_column": "answer",
            "target": {"path": "t"},
            "head": {"kind": "block", **head},
            "training": {"num_steps": 1},
            "output": {"path": "out"},
        }
    )


@pytest.fixture
def target() -> Target:
    return Target.load(CheckpointRef(str(CHECKPOINTS / "text_target")), "float32", "cpu")


def test_a_padding_token_without_an_embedding_is_no_mask(target: Target) -> None:
    tokenizer, weights = target.front_end.tokenizer, target.decoder.get_input_embeddings().weight  # type: ignore[operator]
    assert not weights[tokenizer.pad_token_id].any()
    head = fresh_head(job(), target)
    assert isinstance(head, BlockTask)
    assert head.network.shape.mask_token_id == tokenizer.unk_token_id
    with torch.no_grad():
        weights[tokenizer.pad_token_id] = 1.0
    again = fresh_head(job(), target)
    assert isinstance(again, BlockTask)
    assert again.network.shape.mask_token_id == tokenizer.pad_token_id


def test_unfit_masks_are_refused(target: Target) -> None:
    tokenizer, weights = target.front_end.tokenizer, target.decoder.get_input_embeddings().weight  # type: ignore[operator]
    for token_id, problem in (
        (tokenizer.pad_token_id, "has an embedding of zeros"),
        (tokenizer.eos_token_id, "ends answers"),
        (len(weights), "is outside the"),
    ):
        with pytest.raises(ConfigError, match=f"head.mask_token_id: {token_id} {problem}"):
            fresh_head(job(mask_token_id=token_id), target)
    with torch.no_grad():
        weights.zero_()
    with pytest.raises(ConfigError, match="no special token of the tokenizer can be the mask"):
        fresh_head(job(), target)
