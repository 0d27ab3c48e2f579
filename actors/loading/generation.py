"""Follows a target's generation settings (generation_config.json) in the job's section `sampling`.

A job decodes as transformers' `generate` does: the checkpoint's logits processors are used unless the job sets them.
Whether a job samples, and how, is the job's choice, or with `sampling.from_checkpoint` the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.loading.drafters import read_at
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig, CheckpointConfig, SamplingConfig
from models.loading.generation_settings import OWN_FIELDS, read_generation_settings

Use = Literal["processor", "sampling", "sampler", "refused", "none"]
NUM_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Setting:
    """Use of a generation setting: a `processor` is followed; `sampling` is followed with `sampling.from_checkpoint`,
    and a `sampler` is then refused; `refused` settings change tokens and are not built; `none` change no tokens.

    `inert` are values without effect, or `active` are all values with an effect. `key` is the key of `sampling` that
    replaces the setting, by default its name.
    """

    use: Use
    inert: tuple[Any, ...] = ()
    note: str = ""
    key: str = ""
    active: tuple[Any, ...] = ()

    def is_active(self, value: Any) -> bool:
        """Return whether a value may change the tokens of a job."""
        if self.use == "none" or value is None:
            return False
        return value in self.active if self.active else value not in self.inert


_BEAMS = "beam search"
_ASSISTED = "assisted generation, which keeps the tokens"
_MEMORY = "caches and speed"
_OUTPUT = "the outputs of `generate`"
SETTINGS = {
    "max_length": Setting("none", note="`sampling.max_new_tokens`"),
    "max_new_tokens": Setting("none", note="`sampling.max_new_tokens`"),
    "min_length": Setting("processor", (0,)),
    "min_new_tokens": Setting("processor", (0,)),
    "early_stopping": Setting("none", note=_BEAMS),
    "max_time": Setting("refused", note="a time limit; see `pool.max_row_s`"),
    "stop_strings": Setting("refused", ([], ""), "strings that end texts, as `sampling.stop`", key="stop"),
    "do_sample": Setting("sampling", (False,), key="temperature"),
    "num_beams": Setting("refused", (1,), _BEAMS),
    "use_mtp": Setting("none", note=_ASSISTED),
    "use_cache": Setting("none", note=_MEMORY),
    "cache_implementation": Setting("refused", note="rounded keys and values", active=("quantized",)),
    "cache_config": Setting("none", note=_MEMORY),
    "max_cache_len": Setting("none", note=_MEMORY),
    "temperature": Setting("sampling", (1.0,)),
    "top_k": Setting("sampling"),
    "top_p": Setting("sampling", (1.0,)),
    "min_p": Setting("sampling"),
    "top_h": Setting("sampler", note="entropy-bounded sampling"),
    "typical_p": Setting("sampler", (1.0,), "locally typical sampling"),
    "epsilon_cutoff": Setting("sampler", (0.0,), "epsilon sampling"),
    "eta_cutoff": Setting("sampler", (0.0,), "eta sampling"),
    "repetition_penalty": Setting("processor", (1.0,)),
    "encoder_repetition_penalty": Setting("refused", (1.0,), "a penalty on tokens that the prompt lacks"),
    "length_penalty": Setting("none", note=_BEAMS),
    "no_repeat_ngram_size": Setting("processor", (0,)),
    "bad_words_ids": Setting("processor", ([],)),
    "renormalize_logits": Setting("none", note="a constant that is added to all logits"),
    "forced_bos_token_id": Setting("processor"),
    "forced_eos_token_id": Setting("processor", ([],)),
    "remove_invalid_values": Setting("none", note="rows with NaN logits are error rows"),
    "exponential_decay_length_penalty": Setting("refused", note="a growing bias of EOS"),
    "suppress_tokens": Setting("processor", ([],)),
    "begin_suppress_tokens": Setting("processor", ([],)),
    "sequence_bias": Setting("processor", ([], {})),
    "token_healing": Setting("refused", (False,), "another tokenization of the prompt's end"),
    "guidance_scale": Setting("refused", (1.0,), "classifier-free guidance of texts"),
    "watermarking_config": Setting("refused", note="a watermark"),
    "num_return_sequences": Setting("refused", (1,), "several outputs of a row"),
    "output_attentions": Setting("none", note=_OUTPUT),
    "output_hidden_states": Setting("none", note=_OUTPUT),
    "output_scores": Setting("none", note=_OUTPUT),
    "output_logits": Setting("none", note=_OUTPUT),
    "return_dict_in_generate": Setting("none", note=_OUTPUT),
    "pad_token_id": Setting("none", note="padding, which the engine does not have"),
    "bos_token_id": Setting("none", note="empty prompts"),
    "eos_token_id": Setting("none", note="always followed; see `sampling.ignore_eos`"),
    "encoder_no_repeat_ngram_size": Setting("refused", (0,), "no n-gram of the prompt"),
    "decoder_start_token_id": Setting("none", note="encoder-decoders"),
    "is_assistant": Setting("refused", (False,), "an end of the text at unlikely tokens"),
    "num_assistant_tokens": Setting("none", note=_ASSISTED),
    "num_assistant_tokens_schedule": Setting("none", note=_ASSISTED),
    "assistant_confidence_threshold": Setting("none", note=_ASSISTED),
    "prompt_lookup_num_tokens": Setting("none", note=_ASSISTED),
    "max_matching_ngram_size": Setting("none", note=_ASSISTED),
    "assistant_early_exit": Setting("none", note=_ASSISTED),
    "assistant_lookbehind": Setting("none", note=_ASSISTED),
    "target_lookbehind": Setting("none", note=_ASSISTED),
    "assistant_ensemble_weight": Setting("refused", note="a mixture with an assistant's distribution"),
    "speculation_type": Setting("none", note=_ASSISTED),
    "compile_config": Setting("none", note=_MEMORY),
    "disable_compile": Setting("none", note=_MEMORY),
    "continuous_batching_config": Setting("none", note=_MEMORY),
    "low_memory": Setting("none", note=_MEMORY),
    "penalty_alpha": Setting("refused", (0.0,), "contrastive search"),
    "dola_layers": Setting("refused", note="contrast between layers (DoLa)"),
    "diversity_penalty": Setting("none", note=_BEAMS),
    "num_beam_groups": Setting("none", note=_BEAMS),
    "constraints": Setting("refused", note="constrained beam search"),
    "force_words_ids": Setting("refused", note="constrained beam search"),
    "prefill_chunk_size": Setting("none", note=_MEMORY),
    # Not of `GenerationConfig`: of single architectures, and of a checkpoint's own code.
    "no_repeat_ngram_window_size": Setting("refused", note="n-grams of the last tokens only"),
    "custom_generate": Setting("refused", note="code of the checkpoint in place of `generate`"),
}
"""Every setting of transformers' `GenerationConfig`, and further ones; settings of a newer transformers are refused."""
UNKNOWN = Setting("refused", note="unknown to this version")


@dataclass(frozen=True)
class Generation:
    """Generation settings of a target: all that change tokens (`asked`), and the job's section `sampling` with those
    that are used, None if it is unchanged. `unused` names the others with the reason."""

    sampling: SamplingConfig | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> dict[str, str]:
        """Return the lines of a plan, by label; none if the checkpoint asks for nothing."""
        if not self.asked:
            return {}
        used = [_shown(name, value) for name, value in self.asked.items() if name not in self.unused]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.unused.items():
            reasons.setdefault(reason, []).append(name)
        unused = [f"not {', '.join(names)} ({reason})" for reason, names in reasons.items()]
        return {
            "settings": f"the target asks for {', '.join(_shown(name, value) for name, value in self.asked.items())}",
            "used": "; ".join([", ".join(used) or "none of them", *unused]),
        }


def _shown(name: str, value: Any) -> str:
    text = f"{value}"
    if isinstance(value, (list, tuple)) and len(text) > NUM_SHOWN_CHARS:
        text = f"[{len(value)} entries]"
    return f"{name} {text:.{NUM_SHOWN_CHARS}}"


def follow(config: CaptionJobConfig, where: str, vocab_size: int) -> Generation:
    """Return the generation settings of the target, and `config.sampling` with those that are used.

    `vocab_size` bounds the tokens of sequences and forced tokens.

    Raises:
        ConfigError: the settings are invalid, or ask for what is not built; the message names them and the key of the
            job file that overrides them.
    """
    if unknown := [
        name for name in config.sampling.ignored_settings if name not in SETTINGS and name not in OWN_FIELDS
    ]:
        raise ConfigError(f"sampling.ignored_settings: {unknown[0]!r} is no generation setting of transformers")
    origin = f"{where}: {config.model.target.path}: its generation settings"
    asked = read_active(where, config.model.target)
    generation = resolve(config.sampling, asked, origin, config.columns.temperature is not None)
    sampling = generation.sampling or config.sampling
    _check_tokens(sampling, origin, vocab_size)
    name = None if config.output is None else next(sampling.ends, None)
    if name is not None:
        raise ConfigError(
            f"{origin} ask for {_shown(name, asked[name])}, and the structure of output decides where a text ends; set "
            f"sampling.ignored_settings: [{name}]"
        )
    return generation


def measured_options(where: str, target: CheckpointConfig, vocab_size: int) -> dict[str, Any]:
    """Return options of `decoding.Sampling`: the processors of a target for measurements, without what is not built.

    Raises:
        ConfigError: the settings are invalid.
    """
    origin, asked = f"{where}: {target.path}: its generation settings", read_active(where, target)
    refused = tuple(name for name in asked if SETTINGS.get(name, UNKNOWN).use == "refused")
    plain = SamplingConfig(ignored_settings=refused)
    sampling = resolve(plain, asked, origin).sampling or plain
    _check_tokens(sampling, origin, vocab_size)
    return sampling.options


def read_active(where: str, target: CheckpointConfig) -> dict[str, Any]:
    """Return the generation settings of a checkpoint that may change tokens; ConfigError if they cannot be read."""
    settings = read_at(where, target, read_generation_settings)
    return {name: value for name, value in settings.items() if SETTINGS.get(name, UNKNOWN).is_active(value)}


def resolve(sampling: SamplingConfig, asked: Mapping[str, Any], origin: str, samples: bool = False) -> Generation:
    """Return the section `sampling` with the settings `asked` that are used, and the reasons against the others.

    `samples` is whether some rows sample by values of their own. `origin` begins the message of a ConfigError.
    """
    set_fields = sampling.model_fields_set
    known = {name: value for name, value in asked.items() if name not in sampling.ignored_settings}
    values, unused, refused = dict[str, Any](), dict[str, str](), dict[str, str]()
    if sampling.from_checkpoint:
        values = _drawn(sampling, known, samples)
        samples = samples or values.get("temperature", sampling.temperature) > 0
    for name, value in asked.items():
        setting = SETTINGS.get(name, UNKNOWN)
        if name not in known:
            unused[name] = "sampling.ignored_settings"
        elif (key := setting.key or name) in set_fields:
            unused[name] = f"sampling.{key} is set"
        elif setting.use == "processor":
            values[name] = value
            if name.endswith("suppress_tokens") and isinstance(value, list):  # transformers ignores negative ones
                values[name] = [token for token in value if not (isinstance(token, int) and token < 0)]
        elif setting.use == "refused":
            refused[name] = setting.note
        elif not sampling.from_checkpoint:
            unused[name] = "sampling.from_checkpoint is false"
        elif not samples:
            unused[name] = "no row is sampled"
        elif setting.use == "sampler":
            refused[name] = setting.note
    if refused:
        notes = [f"{_shown(name, asked[name])} ({note})" for name, note in refused.items()]
        raise ConfigError(
            f"{origin} ask for {', '.join(notes)}, which is not built; to decode without, set "
            f"sampling.ignored_settings: [{', '.join(refused)}]"
        )
    if "min_new_tokens" in set_fields or "min_new_tokens" in values:
        values.pop("min_length", None)  # as in `generate`
    if not values:
        return Generation(None, asked, unused)
    try:
        used = validate(SamplingConfig, sampling.model_dump(mode="json", exclude_unset=True) | values, origin)
    except ConfigError as error:
        raise ConfigError(f"{error}\n(keys of sampling in the job replace the target's settings)") from None
    return Generation(used, asked, unused)


def _drawn(sampling: SamplingConfig, known: Mapping[str, Any], samples: bool) -> dict[str, Any]:
    """Return temperature and filters that the job does not set, as `generate` chooses them."""
    set_fields = sampling.model_fields_set
    temperature = known.get("temperature", 1.0) if known.get("do_sample") is True else 0.0
    values = {"temperature": temperature}
    if samples or (sampling.temperature if "temperature" in set_fields else temperature) > 0:
        values |= {name: known.get(name, value) for name, value in {"top_k": 50, "top_p": 1.0, "min_p": 0.0}.items()}
    return {name: value for name, value in values.items() if name not in set_fields}


def _check_tokens(sampling: SamplingConfig, origin: str, vocab_size: int) -> None:
    forced = sampling.forced_bos_token_id
    sequences = {
        "bad_words_ids": sampling.bad_words_ids,
        "sequence_bias": tuple(tokens for tokens, _ in sampling.sequence_bias),
        "forced_bos_token_id": () if forced is None else ((forced,),),
        "forced_eos_token_id": (sampling.forced_eos_token_id,),
    }
    for name, lists in sequences.items():
        largest = max((token for tokens in lists for token in tokens), default=-1)
        if largest >= vocab_size:
            raise ConfigError(
                f"sampling.{name}: the target has no token {largest}, but {vocab_size:,} tokens; if {origin} ask for "
                f"it, set sampling.ignored_settings: [{name}]"
            )
