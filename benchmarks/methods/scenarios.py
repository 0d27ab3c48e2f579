"""Builds the zoo's scenarios: questions with images or clips, and the scores of their answers.

In distribution: single images, two images, a second turn, text only, clips of three frames. Out of distribution:
stories of five unrelated images, and clips of six frames. The video pair has one scenario for each question on a clip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.inputs.clip import Clip
from zoo.quality import ATTRIBUTE_WORDS, Question, ask, count_attributes, mask_fillers, other_questions
from zoo.video import attributes_right, held_out_clips
from zoo.world import dialogue, grammar, motion, sample_scenes
from zoo.world.render import render_scene
from zoo.world.scene import draw_clip, draw_scene, scene_rng

Score = Callable[[str], tuple[int, int]]
"""Text → (attributes right, attributes stated); scenarios with one right answer count one attribute."""
IN_DISTRIBUTION = ("single", "two_images", "second_turn", "text_only", "clip")
OUT_OF_DISTRIBUTION = ("story", "long_clip")
VIDEO = tuple(motion.PROMPTS)
"""Scenarios of the video pair."""
STORY_IMAGES = 5
LONG_CLIP_FRAMES = 6


@dataclass(frozen=True)
class Case:
    """One question: chat `messages` with uint8 RGB `images` (height, width, 3) and `videos`. `score` maps an answer to
    (attributes right, attributes stated); None if answers are not scored. `truth` is a correct caption, for scenarios
    with attribute words."""

    case_id: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[NDArray[np.uint8], ...]
    score: Score | None
    truth: str = ""
    videos: tuple[Clip, ...] = ()


def attribute_overlap(text: str, truth: str) -> tuple[int, int, int]:
    """Return the number of attribute words shared by `text` and `truth`, in `text`, and in `truth`."""
    words = ([word.strip(".,:;") for word in string.split()] for string in (text, truth))
    output, true = (Counter(word for word in tokens if word in ATTRIBUTE_WORDS) for tokens in words)
    return (output & true).total(), output.total(), true.total()


def build_scenarios(num_cases: int, seed: int) -> dict[str, list[Case]]:
    """Return `num_cases` held-out cases of every scenario."""
    questions = other_questions(num_cases, seed)
    scenarios = {"single": _single(num_cases, seed)}
    for name, kind in (("two_images", "change"), ("second_turn", "second"), ("text_only", "text"), ("clip", "clip")):
        scenarios[name] = [_from_question(f"{name}-{i}", question) for i, question in enumerate(questions[kind])]
    scenarios["story"], scenarios["long_clip"] = [], []
    for index in range(num_cases):
        rng = scene_rng("held_out", seed + 2, index)
        pictures = [render_scene(draw_scene(rng, "held_out")) for _ in range(STORY_IMAGES)]
        prompt = rng.choice(sorted(grammar.PROMPTS.values()))
        # The pair was not trained on five images, so answers have no score.
        scenarios["story"].append(_case(f"story-{index}", ask(prompt, pictures, ""), None))
        frames = [render_scene(frame) for frame in draw_clip(rng, "held_out", LONG_CLIP_FRAMES)]
        scenarios["long_clip"].append(_case(f"long_clip-{index}", ask(dialogue.CLIP_PROMPT, frames, ""), None))
    return scenarios


def build_video_scenarios(num_cases: int, seed: int) -> dict[str, list[Case]]:
    """Return `num_cases` held-out clips for each question, scored by the attributes that the true caption states."""
    scenarios: dict[str, list[Case]] = {name: [] for name in VIDEO}
    for index, (moved, phrasing, clip) in enumerate(held_out_clips(num_cases * len(VIDEO), seed)):
        content = [{"type": "video"}, {"type": "text", "text": motion.PROMPTS[phrasing]}]

        def score(text: str, moved: motion.Motion = moved, phrasing: str = phrasing) -> tuple[int, int]:
            return attributes_right(moved, phrasing, text)

        case = Case(f"{phrasing}-{index}", ({"role": "user", "content": content},), (), score, videos=(clip,))
        scenarios[phrasing].append(case)
    return scenarios


def _single(num_cases: int, seed: int) -> list[Case]:
    phrasing_of = {prompt: phrasing for phrasing, prompt in grammar.PROMPTS.items()}
    cases = []
    for index, (scene, image, caption, prompt) in enumerate(sample_scenes("held_out", num_cases, seed)):

        def score(text: str, scene: Any = scene, phrasing: str = phrasing_of[prompt]) -> tuple[int, int]:
            return count_attributes(scene, phrasing, text.strip())

        cases.append(_case(f"single-{index}", ask(prompt, [image], caption), score, caption))
    return cases


def _from_question(case_id: str, question: Question) -> Case:
    truth = mask_fillers(question.answer)
    return _case(case_id, question, lambda text: (int(mask_fillers(text.strip()) == truth), 1))


def _case(case_id: str, question: Question, score: Score | None, truth: str = "") -> Case:
    images = tuple(np.asarray(image.convert("RGB")) for image in question.images)
    return Case(case_id, tuple(map(dict, question.messages)), images, score, truth)
