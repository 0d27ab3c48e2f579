"""P-EAGLE heads: networks and drafts equal recorded outputs of the public code, and files are read or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafters import ParallelEagleDrafter
from decoding.tree import Frontier
from decoding.trees import DynamicTree
from models.heads.formats import EAGLE3
from models.heads.loader import load_head, read_shape
from models.loading.checkpoints import CheckpointError
from tests.models.heads import test_eagle3
from tests.models.heads.test_eagle3 import CLOSE, CPU, NUM_LAYERS, RECORDED, VOCAB, changed, load, opened

CASES = sorted(path.name for path in RECORDED.glob("peagle*"))


def test_both_kinds_of_layers_are_recorded() -> None:
    assert CASES == ["peagle_speculators", "peagle_speculators_qwen3"]


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_the_public_code(case: str) -> None:
    test_eagle3.test_outputs_equal_the_public_code(case)


@pytest.mark.parametrize("num_levels", [1, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_all_levels_of_one_forward_equal_the_public_code(case: str, num_levels: int) -> None:
    """The levels do not depend on the tokens above them."""
    network, recorded = load(case)
    drafter, slots = opened(network, recorded, DynamicTree(1, num_levels - 1, num_levels + 1))
    assert isinstance(drafter, ParallelEagleDrafter)
    before = drafter.num_forwards
    frontier = Frontier.at_root(recorded["tokens"][-1:])
    with torch.no_grad():
        for depth in range(num_levels):
            logits = drafter.draft(slots, frontier)[0, 0]
            torch.testing.assert_close(logits[network.token_ids], recorded["levels.logits"][depth], **CLOSE)
            assert int(logits.argmax()) == int(recorded["chain.tokens"][depth])
            node, above = torch.full((1, 1), depth + 1), torch.zeros(1, 1, dtype=torch.long)
            frontier = frontier.below(node, node - 1, torch.full((1, 1), 7 * depth), above)
    assert drafter.num_forwards - before == (num_levels > 1)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"mask_token_id": None}, {}, "mask_token_id must be a token below 64, not None"),
        ({"mask_token_id": 64}, {}, "mask_token_id must be a token below 64, not 64"),
        ({"mask_token_id": -1}, {}, "not -1"),
        ({"mask_token_id": True}, {}, "not True"),
        ({}, {"mask_hidden": None}, "mask_hidden is missing"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 64)}, r"mask_hidden has shape \[1, 1, 64\] instead of \[1, 1, 96\]"),
        ({}, {"mask_hidden": torch.full((1, 1, 96), torch.nan)}, "mask_hidden has values that are not finite"),
        ({"speculators_model_type": "eagle3"}, {}, "mask_hidden is not known"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Any, config: dict[str, Any], tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_shape(EAGLE3, changed(tmp_path, "peagle_speculators", config, **tensors), NUM_LAYERS)


def test_the_first_releases_name_of_the_mask_is_read(tmp_path: Any) -> None:
    ref = changed(tmp_path, "peagle_speculators", {"mask_token_id": None, "ptd_token_id": 5})
    network = load_head(EAGLE3, ref, "float32", CPU, NUM_LAYERS, torch.zeros(VOCAB, 1))
    assert network.shape.mask_token_id == 5
