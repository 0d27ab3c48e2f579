"""Decides whether decoding tasks run the target's processor, and ships it to them."""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from configs.contexts import CaptionContextConfig, TextOnlyContextConfig
from configs.load import ConfigError
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from pipeline.media.prompt_processor import PromptProcessor

if TYPE_CHECKING:
    from actors.loading.pair import TextPairInfo
    from models.inputs.output_size import OutputSizes


@dataclass(frozen=True)
class Processing:
    """The target's processor; whether images and videos travel beside its outputs; sizes of the outputs."""

    processor: Any
    keeps_pixels: bool
    sizes: OutputSizes

    def for_tasks(self, config: CaptionJobConfig) -> PromptProcessor:
        """Put the processor into Ray's object store, and return what decoding tasks need to run it."""
        reference = ray.put(self.processor)
        fetch = functools.partial(ray.get, reference)
        return PromptProcessor.of(config, fetch, reference.hex(), self.keeps_pixels, self.sizes)


def processing_of(config: CaptionJobConfig, pair: TextPairInfo) -> Processing | None:
    """Return how decoding tasks run the processor of the target; None if the actors run it."""
    if not _in_tasks(config, pair):
        return None
    from models.inputs.output_size import OutputSizes

    side_px = config.source.max_side_px
    sizes = OutputSizes.measure(pair.front_end, side_px if isinstance(side_px, int) else None)
    return Processing(pair.front_end.processor, needs_pixels(config.method, pair), sizes)


def check_processing(config: CaptionJobConfig, pair: TextPairInfo) -> None:
    """Raise ConfigError if `pool.processor` is `tasks` and tasks cannot run the processor."""
    if config.pool.processor == "tasks" and (reason := _obstacle(config, pair)):
        raise ConfigError(f"pool.processor is 'tasks', but {reason}; take 'actor' or leave it out")


def needs_pixels(method: MethodConfig, pair: TextPairInfo) -> bool:
    """Return whether a drafter reads images and videos themselves: a captioner, or a processor of its own."""
    models = [candidate for candidate in method.methods if candidate.drafter.kind == "model"]
    contexts = [
        context
        for candidate in models
        for context in candidate.contexts
        if not isinstance(context, TextOnlyContextConfig)
    ]
    return any(isinstance(context, CaptionContextConfig) or not pair.shares_front_end for context in contexts)


def _in_tasks(config: CaptionJobConfig, pair: TextPairInfo) -> bool:
    choice = config.pool.processor
    if choice != "auto":
        return choice == "tasks"
    return config.pool.gpus > 0 and pair.front_end.takes_images and not _obstacle(config, pair)


def _obstacle(config: CaptionJobConfig, pair: TextPairInfo) -> str:
    """Return why tasks cannot run the processor; empty if they can."""
    if config.model.target.allow_remote_code:
        return "model.target.allow_remote_code is set, and code of a checkpoint is not shipped to tasks"
    if config.source.video.cuts and needs_pixels(config.method, pair):
        return "the drafter needs pixels, and with clips of videos outputs and pixels do not travel together"
    try:
        cloudpickle.dumps(pair.front_end.processor)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        return f"the target's processor cannot be pickled ({error})"
    return ""
