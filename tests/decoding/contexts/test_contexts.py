"""Tests the token positions of a prompt that each context keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoding import Request
from decoding.contexts import Caption, Full, Pooled, TextOnly
from decoding.contexts.pruned import evenly_spaced, guided, prune
from decoding.contracts import PrefillOutput
from models.backends.attention_probe import AttentionProbe
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from tests import toys

IMAGE, NUM_PATCHES = 3, 4
REQUEST = Request("r", "<s> w5 <image> w6 <image> w7", (toys.picture(1), toys.picture(2)))


def build(context: Any, request: Request = REQUEST, family: str = "llava") -> Prefix:
    target = toys.target(family)
    return context.build(request, PrefillOutput(target.encode(request.prompt, request.images, request.videos)), target)  # type: ignore[no-any-return]


def pictured(family: str, num_images: int) -> Request:
    """The first toy prompt with so many images."""
    prompts = (toys.prompt(family, seed) for seed in range(20))
    return next(Request("r", *prompt) for prompt in prompts if len(prompt[1]) == num_images)


def test_the_whole_prompt_holds_a_run_of_columns_for_each_image() -> None:
    whole = build(Full())
    assert whole.token_ids.tolist() == [1, 5, *[IMAGE] * 4, 6, *[IMAGE] * 4, 7]
    assert whole.visual.tolist() == [token == IMAGE for token in whole.token_ids.tolist()]


def test_without_images_each_run_is_one_newline_and_no_column_is_visual() -> None:
    text = build(TextOnly())
    newline = toys.front_end("llava").tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert text.token_ids.tolist() == [1, 5, newline[-1], 6, newline[-1], 7]
    assert not bool(text.visual.any())
    assert text.positions.tolist() == list(range(6))


class TwoWords:
    """A captioner whose caption names the picture."""

    def caption(self, image: NDArray[np.uint8]) -> str:
        return f"w{20 + image.shape[1] % 5} w30"


def test_a_caption_replaces_its_image() -> None:
    result = build(Caption(TwoWords(), lead="w40 "))  # type: ignore[arg-type]
    first, second = (20 + image.shape[1] % 5 for image in REQUEST.images)
    assert result.token_ids.tolist() == [1, 5, 40, first, 30, 6, 40, second, 30, 7]


def test_videos_are_one_newline_or_the_words_for_their_middle_frame() -> None:
    family = "qwen2_5_vl"
    text, clips = toys.with_video(family, "<s> w7 w5 <image> w6", 1)
    picture = toys.picture(1, family)
    request = Request("v", text, (picture,), videos=clips)
    newline = toys.front_end(family).tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    gone = build(TextOnly(), request, family)
    assert gone.token_ids.tolist() == [1, 7, 5, newline, 6, 5, newline, 6, 8]
    assert not bool(gone.visual.any())

    class FirstValue:
        def caption(self, image: NDArray[np.uint8]) -> str:
            return f"w{20 + int(image[0, 0, 0]) % 40}"

    result = build(Caption(FirstValue(), lead="w10 "), request, family)  # type: ignore[arg-type]
    words = [20 + int(frame[0, 0, 0]) % 40 for frame in (picture, clips[0].frames[len(clips[0].frames) // 2])]
    assert result.token_ids.tolist() == [1, 7, 5, 10, words[0], 6, 5, 10, words[1], 6, 8]
    with pytest.raises(PromptError, match=r"1 video placeholder\(s\) for 0 video\(s\)"):
        TextOnly().build(replace(request, videos=()), PrefillOutput(gone), toys.target(family))


def test_a_pooled_image_has_a_quarter_of_its_columns_each_the_mean_of_four_features() -> None:
    pooled = build(Pooled())
    assert pooled.token_ids.tolist() == [1, 5, IMAGE, 6, IMAGE, 7]
    target = toys.target("llava")
    model: Any = target.model
    inputs = target.front_end.encode(REQUEST.prompt, REQUEST.images)
    with torch.inference_mode():
        states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
        expected = model.model.multi_modal_projector(states.mean(dim=1, keepdim=True))
    torch.testing.assert_close(pooled.embeds[pooled.visual], expected[:, 0])


def test_pooling_is_refused_without_a_known_grid() -> None:
    for family in ("llava_next", "llava_onevision"):
        with pytest.raises(PromptError, match=r"LLaVA-1\.5"):
            build(Pooled(), pictured(family, 1), family)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_pooling_by_position_averages_neighbours_of_each_picture_and_each_frame(family: str) -> None:
    text, clips = toys.with_video(family, pictured(family, 2).prompt, 4)
    request = replace(pictured(family, 2), prompt=text, videos=clips)
    whole, pooled = build(Full(), request, family), build(Pooled(), request, family)
    expected: dict[tuple[int, ...], list[int]] = {}
    run, before = 0, -2
    corner: dict[int, tuple[int, int]] = {}
    for column in whole.visual.nonzero()[:, 0].tolist():
        run, before = run + (column != before + 1), column
        time, height, width = whole.positions[:, column].tolist()
        top, left = corner.setdefault(run, (height, width))
        expected.setdefault((run, time, (height - top) // 2, (width - left) // 2), []).append(column)
    blocks = sorted(expected.values())
    assert len(blocks) == int(pooled.visual.sum()) < int(whole.visual.sum())
    torch.testing.assert_close(
        pooled.embeds[pooled.visual], torch.stack([whole.embeds[block].mean(0) for block in blocks])
    )
    assert torch.equal(pooled.positions[:, pooled.visual], whole.positions[:, [block[0] for block in blocks]])
    assert torch.equal(pooled.embeds[~pooled.visual], whole.embeds[~whole.visual])
    assert pooled.next_position == whole.next_position
    position = {column: row for row, column in enumerate(whole.visual.nonzero()[:, 0].tolist())}
    for mine, theirs in zip(pooled.deepstack, whole.deepstack, strict=True):
        means = [theirs[[position[column] for column in block]].mean(0) for block in blocks]
        torch.testing.assert_close(mine, torch.stack(means))


def test_pooling_a_video_of_onevision_keeps_its_last_column() -> None:
    text, clips = toys.with_video("llava_onevision", "<s> w5", 3)
    request = Request("v", text, videos=clips)
    whole, pooled = build(Full(), request, "llava_onevision"), build(Pooled(), request, "llava_onevision")
    num_frames = len(clips[0].frames)
    assert int(whole.visual.sum()) == num_frames + 1, "the toy's frames are one feature each"
    assert torch.equal(pooled.embeds, whole.embeds)


def test_even_spacing_keeps_the_first_and_the_last() -> None:
    assert evenly_spaced(torch.arange(10), 4).tolist() == [0, 3, 6, 9]
    assert evenly_spaced(torch.arange(10), 1).tolist() == [0]
    assert evenly_spaced(torch.arange(5), 5).tolist() == [0, 1, 2, 3, 4]


def test_guided_pruning_takes_the_best_share_first_and_spaces_the_rest() -> None:
    scores = torch.tensor([0.05, 0.3, 0.05, 0.05, 0.2, 0.05, 0.1, 0.05, 0.1, 0.05])
    # 0.3 < 0.4 ≤ 0.3 + 0.2: columns 1 and 4; then 2 of the other eight [0 2 3 5 6 7 8 9] at equal distance: 0 and 9.
    assert guided(scores, 4, 0.4).tolist() == [0, 1, 4, 9]
    assert guided(scores, 1, 0.9).tolist() == [1], "the budget cuts the first stage"


def test_pruning_keeps_original_positions_and_so_the_position_that_comes_next() -> None:
    whole = build(Full())
    kept = torch.tensor([0, 3, 7])
    pruned = prune(whole, kept, compact=False)
    assert pruned.token_ids.tolist() == [1, 5, IMAGE, IMAGE, 6, IMAGE, 7]
    assert pruned.positions.tolist() == [0, 1, 2, 5, 6, 10, 11]
    assert pruned.length + pruned.position_offset == whole.length
    compact = prune(whole, kept, compact=True)
    assert compact.positions.tolist() == list(range(7))
    assert compact.position_offset == 0
    torch.testing.assert_close(compact.embeds, whole.embeds[[0, 1, 2, 5, 6, 10, 11]])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_pruning_keeps_all_three_axes_and_the_deepstack_features_of_what_it_keeps(family: str) -> None:
    request = pictured(family, 2)
    whole = build(Full(), request, family)
    kept = torch.tensor([0, int(whole.visual.sum()) - 1])
    pruned = prune(whole, kept, compact=False)
    columns = [i for i in range(whole.length) if not whole.visual[i]]
    visual = whole.visual.nonzero()[:, 0][kept].tolist()
    expected = sorted(columns + visual)
    assert torch.equal(pruned.positions, whole.positions[..., expected])
    assert pruned.length + pruned.position_offset == whole.length + whole.position_offset
    for mine, theirs in zip(pruned.deepstack, whole.deepstack, strict=True):
        assert torch.equal(mine, theirs[kept])
    assert len(pruned.deepstack) == (0 if family == "qwen2_5_vl" else len(whole.deepstack))


def test_an_image_count_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PromptError, match="1 image placeholder"):
        TextOnly().build(
            Request("r", "<s> <image> w5", REQUEST.images), PrefillOutput(build(Full())), toys.target("llava")
        )


def test_the_attention_probe_equals_eager_attention_weights() -> None:
    generator = torch.Generator().manual_seed(4)
    length = 150
    query = torch.randn(2, 4, length, 8, generator=generator)
    key = torch.randn(2, 2, length, 8, generator=generator)
    marked = torch.zeros(2, length, dtype=torch.bool)
    marked[0, 140:], marked[1, 100:120] = True, True
    prefill_output = AttentionProbe(marked)
    prefill_output.add(query, key, None)
    prefill_output.add(2 * query, key, None)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    means = []
    for scaled in (query, 2 * query):
        scores = (scaled @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5).masked_fill(~causal, -torch.inf)
        weights = scores.softmax(-1)
        means.append(torch.stack([weights[row, :, marked[row]].mean(dim=(0, 1)) for row in range(2)]))
    torch.testing.assert_close(prefill_output.mean(), torch.stack(means).mean(0))
