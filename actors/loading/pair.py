"""Loads text targets with their drafters, and checks that they fit each other.

`check` reads no weights and runs on the driver before any actor starts; `load` reads the weights in the actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.loading import loaded_pair
from actors.loading.drafters import Head, check_head, check_layers, is_head, load_head, read_at
from actors.loading.generation import Generation, follow
from actors.loading.grammar import check_output, compile_output
from actors.loading.loaded_pair import LoadedPair, compile_models
from actors.loading.mtp import check_native, load_native
from actors.loading.recurrent import check_recurrent
from actors.loading.vocabulary import NUM_NAMED_DIFFERENCES, check_vocabulary
from configs.contexts import CaptionContextConfig
from configs.load import ConfigError
from configs.schema import (
    AdaptedCheckpointConfig,
    CaptionJobConfig,
    CheckpointConfig,
    TargetCheckpointConfig,
    WeightsConfig,
)
from decoding.grammar import Grammar
from models.inputs.processing import FrontEnd
from models.loading.adapters import read_adapter
from models.loading.checkpoints import (
    CheckpointError,
    CheckpointRef,
    model_loader,
    read_config,
    read_processor,
    revision_of,
)
from models.target import Target

SHARED_INPUT_BYTES = 1 << 28
"""Size of the cache of processed prompts, images and videos that target and drafter share."""


@dataclass(frozen=True)
class TextPairInfo(loaded_pair.PairInfo):
    """Metadata of a text pair, with the target's front end and generation settings; `shares_front_end` is whether a
    drafter that is a model encodes all prompts in the same way. `has_mtp` is whether the target's checkpoint has an MTP
    layer, None if no method asks for one or it is not known before the download."""

    front_end: FrontEnd
    generation: Generation
    shares_front_end: bool = True
    has_mtp: bool | None = None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Apply the target's chat template to one sample's messages, and open the assistant's turn."""
        return self.front_end.render(messages)


@dataclass(frozen=True)
class Pair(LoadedPair):
    """A loaded text pair, with the grammar of `output`, if any."""

    config: CaptionJobConfig
    target: Target
    drafter: Target | Head | None
    info: TextPairInfo
    grammar: Grammar | None = None

    @property
    def max_context_tokens(self) -> int:
        return self.config.pool.max_context_tokens

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        return self.target.front_end.render(messages)

    def decode_after(self, prefix: str, token_ids: Sequence[int]) -> str:
        """See `models.inputs.processing.FrontEnd.decode_after`."""
        return self.target.front_end.decode_after(prefix, token_ids)


def check(config: CaptionJobConfig) -> TextPairInfo:
    """Check the checkpoints of models and captioners without reading weights.

    Raises:
        ConfigError: a checkpoint is missing or unreadable, or the vocabularies do not match; names the dotted path.
    """
    target, drafter, method = config.model.target, config.model.drafter, config.method
    target_config, front_end, target_revision = _describe("model.target", target)
    vocab_size = max(target_config.get_text_config().vocab_size, len(front_end.tokenizer))
    check_output(config, front_end.tokenizer, vocab_size)
    set_template_options(config.template_options, front_end, target.path)
    generation = follow(config, "model.target", vocab_size)
    revisions = {"target": target_revision}
    if front_end.special_tokens_changed:
        revisions["special_tokens"] = "as apply_chat_template"
    target_id = f"{target.path}@{target_revision}"
    if target.adapter is not None:
        revisions["target_adapter"] = check_adapter("model.target", target, target_config)
        target_id += f"+{target.adapter}@{revisions['target_adapter']}"
    drafter_id, shares_front_end, drafter_config = "", True, None
    if method.needs_checkpoint:
        assert drafter is not None
        if is_head(config):
            if drafter.adapter is not None:
                raise ConfigError("model.drafter.adapter: a head takes no adapter; leave it out")
            revisions["drafter"] = check_head(config, drafter, target_config, front_end)
        else:
            drafter_config, drafter_front_end, revisions["drafter"] = _describe("model.drafter", drafter)
            if drafter.adapter is not None:
                revisions["drafter_adapter"] = check_adapter("model.drafter", drafter, drafter_config)
            _check_vocabulary(front_end, drafter_front_end, drafter.path)
            shares_front_end = front_end.reads_like(drafter_front_end)
        drafter_id = f"{drafter.path}@{revisions['drafter']}"
    for index, context in enumerate(method.contexts):
        if isinstance(context, CaptionContextConfig):
            *_, revisions[f"captioner_{index}"] = _describe(f"method.contexts.{index}", context)
    has_mtp = check_native(config, target_config.get_text_config().num_hidden_layers)
    check_recurrent(method, target_config, drafter_config)
    check_layers(method, target.path, target_config.get_text_config().num_hidden_layers)
    for index, (where, section) in enumerate(method.places.items()):
        choice = getattr(section.drafter, "vocabulary", None)
        if choice is not None and (content := check_vocabulary(choice, f"{where}.drafter.vocabulary", front_end)):
            revisions[f"vocabulary_{index}"] = content
    return TextPairInfo(target_id, drafter_id, revisions, front_end, generation, shares_front_end, has_mtp)


def load(config: CaptionJobConfig) -> Pair:
    """Load the pair that `config` names onto its devices; raise ConfigError as `check`."""
    info, model, longest = check(config), config.model, config.pool.max_context_tokens
    smaller: Target | None = None
    if model.drafter is not None and config.method.needs_checkpoint and not is_head(config):
        smaller = load_target(model.drafter, "model.drafter", max_context_tokens=longest)
    # A drafter runs on the first GPU, so the target's layers leave room for it there.
    reserved_bytes = 0 if smaller is None else smaller.num_bytes
    target = load_target(model.target, "model.target", max(1, int(config.pool.gpus)), reserved_bytes, longest)
    target.front_end.template_options = config.template_options
    models, head = [target], None
    if smaller is not None:
        smaller.share_front_end(target, SHARED_INPUT_BYTES)
        models.append(smaller)
    elif config.method.needs_checkpoint:
        head = load_head(config, target)
    target.mtp = load_native(config, target)
    compile_models(config.pool, models)
    for text_model in models:
        text_model.keep_features(config.pool.feature_cache_bytes)
    if target.backend.is_asynchronous:
        target.prefetch_prompts()
    grammar = None
    if config.output is not None:
        grammar = compile_output(config.output, target.front_end.tokenizer, target.vocab_size, target.eos_ids)
    return Pair(config, target, smaller or head, info, grammar=grammar)


def set_template_options(options: dict[str, Any], front_end: FrontEnd, path: str) -> None:
    """Set the options of a front end's chat template; ConfigError if the template of `path` does not read one."""
    if unread := front_end.unread_options(options):
        raise ConfigError(
            f"prompt.template_options.{unread[0]}: the chat template of {path} does not read '{unread[0]}'; leave it "
            "out, or take a name that the template reads"
        )
    front_end.template_options = options


def load_target(
    checkpoint: CheckpointConfig,
    where: str,
    num_devices: int = 1,
    reserved_bytes: int = 0,
    max_context_tokens: int | None = None,
) -> Target:
    """Load one model with `Target.load`; `where` is its dotted path in the job file, named in a ConfigError."""
    quantization = checkpoint.quantization if isinstance(checkpoint, TargetCheckpointConfig) else "none"
    adapter = checkpoint.adapter if isinstance(checkpoint, AdaptedCheckpointConfig) else None
    options = (checkpoint.dtype, checkpoint.device, num_devices, reserved_bytes, quantization, max_context_tokens)
    return read_at(where, checkpoint, lambda ref: Target.load(ref, *options, adapter=adapter))


def check_adapter(where: str, checkpoint: AdaptedCheckpointConfig, config: Any) -> str:
    """Return the digest of a checkpoint's adapter; ConfigError if it cannot be merged into a model of `config`."""
    assert checkpoint.adapter is not None
    try:
        adapter = read_adapter(checkpoint.adapter)
        if not checkpoint.allow_remote_code:
            with torch.device("meta"):
                model = model_loader(config).from_config(config)
            model.tie_weights()
            adapter.check(model)
    except CheckpointError as error:
        raise ConfigError(f"{where}.adapter: {error}") from None
    return adapter.digest


def _describe(where: str, weights: WeightsConfig | CaptionContextConfig) -> tuple[Any, FrontEnd, str]:
    """Read a checkpoint's configuration, front end and revision."""

    def read(ref: CheckpointRef) -> tuple[Any, FrontEnd, str]:
        config = read_config(ref)
        return config, FrontEnd(read_processor(ref, config)), revision_of(ref, config)

    return read_at(where, weights, read)


def _check_vocabulary(target: FrontEnd, drafter: FrontEnd, drafter_path: str) -> None:
    """Raise ConfigError unless common ids mean equal tokens and the drafter has half of the target's tokens."""
    target_ids: dict[str, int] = target.tokenizer.get_vocab()
    drafter_ids: dict[str, int] = drafter.tokenizer.get_vocab()
    by_id = {number: token for token, number in drafter_ids.items()}
    wrong = [
        f"{number} is {token!r} for the target and {by_id[number]!r} for the drafter"
        for token, number in sorted(target_ids.items(), key=lambda item: item[1])
        if number in by_id and by_id[number] != token
    ]
    if wrong:
        raise ConfigError(
            f"model.drafter: {drafter_path} does not share the target's vocabulary: {len(wrong)} ids differ, e.g. id "
            + "; ".join(wrong[:NUM_NAMED_DIFFERENCES])
            + ". Choose a drafter with the target's tokenizer."
        )
    num_tokens, num_shared = len(target_ids), len(target_ids.keys() & drafter_ids.keys())
    if num_shared < num_tokens // 2:
        raise ConfigError(
            f"model.drafter: {drafter_path} knows only {num_shared} of the target's {num_tokens} tokens, too few to "
            "draft"
        )
