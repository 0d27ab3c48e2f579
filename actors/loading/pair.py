"""Loads pairs of a target and a drafter, checked against each other.

`check` is cheap and runs on the driver before anything starts; `load` reads the weights in the actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.loading.compiling import compile_models
from actors.loading.heads import Head, check_head, is_head, load_head
from actors.loading.method import build_method, plain_method
from actors.loading.slot_count import count_slots
from actors.loading.vocabulary import check_vocabulary
from configs import schema
from configs.contexts import CaptionContext
from configs.load import ConfigError
from configs.method import Method as MethodChoice
from decoding import Engine
from decoding.contracts import Method
from decoding.drafters.guarded import guarded
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointError, CheckpointRef, read_config, read_processor, revision_of
from models.target import Target

NUM_NAMED_DIFFERENCES = 3
SHARED_INPUT_BYTES = 1 << 28
"""Of prompts, images and videos ready for a model, which target and drafter both read."""


@dataclass(frozen=True)
class PairInfo:
    """What is known of a pair without its weights; `revisions` names each checkpoint's content."""

    front_end: FrontEnd
    target_id: str
    drafter_id: str
    revisions: dict[str, str]

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The target's chat template over one sample's messages, the turn to be answered opened."""
        return self.front_end.render(messages)


@dataclass(frozen=True)
class Pair:
    """A loaded pair; `drafter` is a model, a head on the target, or None where the method needs neither."""

    config: schema.CaptionJob
    target: Target
    drafter: Target | Head | None
    target_id: str
    drafter_id: str
    revisions: dict[str, str]

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """See `PairInfo.render`."""
        return self.target.front_end.render(messages)

    def engine(self, slots: int, max_context_tokens: int, choice: MethodChoice | None = None) -> Engine:
        """A fresh engine over this pair, with the configured method; or, of several that it names, with this one."""
        method = guarded(build_method(choice or self.config.method, self.drafter, self.target))
        return self._engine(method, slots, max_context_tokens)

    def count_slots(self, max_context_tokens: int) -> tuple[int, str]:
        """How many slots there is memory for, whichever of the job's methods decodes; and why, in words."""
        config = self.config
        return count_slots(config.pool, config.method.methods, self.target, self.drafter, max_context_tokens)

    def plain_engine(self, max_context_tokens: int) -> Engine:
        """A fresh engine of one slot, for rows on which the drafter failed."""
        return self._engine(plain_method(), 1, max_context_tokens)

    def _engine(self, method: Method, slots: int, max_context_tokens: int) -> Engine:
        pool = self.config.pool
        return Engine(self.target, method, slots, max_context_tokens, pool.max_row_s, pool.max_prefill_tokens)


def check(config: schema.CaptionJob) -> PairInfo:
    """Look at both checkpoints, and at captioners that contexts name, without reading weights.

    Raises:
        ConfigError: a checkpoint is missing or unreadable, or the vocabularies do not match; names the dotted path.
    """
    target_ref = _ref(config.model.target)
    target_config, front_end = _describe(target_ref, "model.target")
    revisions = {"target": revision_of(target_ref, target_config)}
    drafter_id = ""
    if config.method.needs_checkpoint:
        assert config.model.drafter is not None
        drafter_ref = _ref(config.model.drafter)
        if is_head(config):
            revisions["drafter"] = check_head(config, drafter_ref, target_config, front_end)
        else:
            drafter_config, drafter_front_end = _describe(drafter_ref, "model.drafter")
            _check_vocabulary(front_end, drafter_front_end, drafter_ref.path)
            revisions["drafter"] = revision_of(drafter_ref, drafter_config)
        drafter_id = _identity(drafter_ref, revisions["drafter"])
    for place, context in enumerate(config.method.contexts):
        if isinstance(context, CaptionContext):
            ref = CheckpointRef(context.path, context.revision)
            captioner_config, _ = _describe(ref, f"method.contexts.{place}")
            revisions[f"captioner_{place}"] = revision_of(ref, captioner_config)
    auto = config.method.auto
    written = (
        {"method": config.method}
        if auto is None
        else {f"method.auto.candidates.{place}": one for place, one in enumerate(auto.candidates)}
    )
    for place, (where, method) in enumerate(written.items()):
        choice = getattr(method.drafter, "vocabulary", None)
        if choice is not None and (content := check_vocabulary(choice, f"{where}.drafter.vocabulary", front_end)):
            revisions[f"vocabulary_{place}"] = content
    return PairInfo(front_end, _identity(target_ref, revisions["target"]), drafter_id, revisions)


def load(config: schema.CaptionJob, torch_threads: int | None = None) -> Pair:
    """Load the pair that `config` names onto its devices.

    Raises:
        ConfigError: as `check`, and where weights are missing or torn.
    """
    if torch_threads is not None:
        torch.set_num_threads(torch_threads)
    info = check(config)
    drafter: Target | Head | None = None
    drafts = config.model.drafter is not None and info.drafter_id
    if config.model.drafter is not None and drafts and not is_head(config):
        drafter = load_target(config.model.drafter, "model.drafter")
    # A drafter runs on the first GPU, so the target's layers leave room for it there.
    reserved_bytes = drafter.num_bytes if isinstance(drafter, Target) else 0
    target = load_target(config.model.target, "model.target", max(1, int(config.pool.num_gpus)), reserved_bytes)
    if config.model.drafter is not None and drafts and is_head(config):
        drafter = load_head(config, _ref(config.model.drafter), target)
    if isinstance(drafter, Target):
        drafter.share_front_end(target, SHARED_INPUT_BYTES)
    models = [model for model in (target, drafter) if isinstance(model, Target)]
    compile_models(config.pool, models)
    for model in models:
        model.keep_features(config.pool.feature_cache_bytes)
    if target.backend.is_asynchronous:
        target.prefetch_prompts()
    return Pair(config, target, drafter, info.target_id, info.drafter_id, info.revisions)


def _ref(checkpoint: schema.Checkpoint) -> CheckpointRef:
    return CheckpointRef(checkpoint.path, checkpoint.revision, checkpoint.allow_remote_code)


def _identity(ref: CheckpointRef, revision: str) -> str:
    return f"{ref.path}@{revision}"


def _describe(ref: CheckpointRef, where: str) -> tuple[Any, FrontEnd]:
    try:
        config = read_config(ref)
        return config, FrontEnd(read_processor(ref, config))
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None


def load_target(checkpoint: schema.Checkpoint, where: str, num_devices: int = 1, reserved_bytes: int = 0) -> Target:
    """Load one model; `where` is its dotted path; for the rest see `Target.load`.

    Raises:
        ConfigError: it is missing, torn or of an unsupported kind.
    """
    try:
        return Target.load(
            _ref(checkpoint),
            checkpoint.dtype,
            checkpoint.device,
            num_devices,
            reserved_bytes,
            checkpoint.quantization if isinstance(checkpoint, schema.TargetCheckpoint) else "none",
        )
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_vocabulary(target: FrontEnd, drafter: FrontEnd, drafter_path: str) -> None:
    """Every token that both have must have one id: drafts are ids, and the target judges ids."""
    ours: dict[str, int] = target.tokenizer.get_vocab()
    theirs: dict[str, int] = drafter.tokenizer.get_vocab()
    by_id = {number: token for token, number in theirs.items()}
    wrong = [
        f"{number} is {token!r} for the target and {by_id[number]!r} for the drafter"
        for token, number in sorted(ours.items(), key=lambda item: item[1])
        if number in by_id and by_id[number] != token
    ]
    if wrong:
        raise ConfigError(
            f"model.drafter: {drafter_path} does not share the target's vocabulary: {len(wrong)} ids differ, e.g. id "
            + "; ".join(wrong[:NUM_NAMED_DIFFERENCES])
            + ". Choose a drafter with the target's tokenizer."
        )
    shared = len(ours.keys() & theirs.keys())
    if shared < len(ours) // 2:
        raise ConfigError(
            f"model.drafter: {drafter_path} knows only {shared} of the target's {len(ours)} tokens, too few to draft"
        )
