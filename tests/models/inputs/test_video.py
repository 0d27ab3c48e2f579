from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from models.inputs.video import KIND_OF
from tests.models import video_cases
from tests.models.video_cases import CASES, thinned

OFFICIAL = load_file(video_cases.RECORDED)


@pytest.mark.parametrize("name", CASES)
def test_prompts_with_videos_equal_the_output_of_the_official_processor(name) -> None:
    made = video_cases.ours(name)
    expected = {key.split("/")[1] for key in OFFICIAL if key.startswith(f"{name}/") and not key.endswith("/shape")}
    assert set(made) == expected
    for key, tensor in made.items():
        recorded = OFFICIAL[f"{name}/{key}"]
        assert list(tensor.shape) == OFFICIAL[f"{name}/{key}/shape"].tolist(), key
        assert tensor.dtype == recorded.dtype, key
        if tensor.is_floating_point():
            torch.testing.assert_close(thinned(tensor), recorded, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensor, recorded), key


def test_every_family_that_takes_videos_has_its_official_answers() -> None:
    assert {case.processor.__name__ for case in CASES.values()} == set(KIND_OF)
