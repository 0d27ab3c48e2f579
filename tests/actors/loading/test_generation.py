"""A target's generation settings are followed as `generate` follows them, unless the job replaces or ignores them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from actors.loading import pair
from actors.loading.generation import SETTINGS, Generation, measured_options, read_active, resolve
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig, SamplingConfig
from decoding import Request, Sampling
from models.loading.generation_settings import MODEL_FIELDS, OWN_FIELDS
from tests import toys
from tests.conformance import grammars

METADATA = {"transformers_version"}
EOS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROCESSED = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[9, 11], [5]],
    "sequence_bias": [[[6], 2.0], [[9, 10], -3.5]],
    "suppress_tokens": [16, 17, -1],
    "begin_suppress_tokens": list(range(20, 60)),
    "min_new_tokens": 4,
    "forced_eos_token_id": 2,
    "temperature": 0.7,
    "top_p": 0.8,
    "do_sample": True,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in ("llama", "llava"):
        (folder / family).mkdir()
        toys.save(family, folder / family)
    return folder


def written(
    saved: Path, folder: Path, settings: dict[str, Any] | None, family: str = "llama", config: Any = lambda _: None
) -> Path:
    """A checkpoint with these generation settings, None for no file; `config` may change its config.json."""
    shutil.copytree(saved / family, folder / family)
    made = folder / family
    (made / "generation_config.json").unlink()
    if settings is not None:
        (made / "generation_config.json").write_text(json.dumps(EOS | settings))
    data = json.loads((made / "config.json").read_text())
    config(data)
    (made / "config.json").write_text(json.dumps(data))
    return made


def job(target: Path, sampling: dict[str, Any] | None = None, **sections: Any) -> CaptionJobConfig:
    data = {
        "source": {"kind": "images", "path": "pictures"},
        "prompt": "Describe.",
        "model": {"target": {"path": str(target), "dtype": "float32", "device": "cpu"}},
        "sampling": {"max_new_tokens": 16} | (sampling or {}),
        "sink": {"path": "out"},
    }
    return validate(CaptionJobConfig, data | sections, "job.yaml")


def resolved(config: CaptionJobConfig) -> CaptionJobConfig:
    sampling = pair.check(config).generation.sampling
    return config if sampling is None else config.model_copy(update={"sampling": sampling})


def decoded(config: CaptionJobConfig, family: str = "llama") -> list[tuple[int, ...]]:
    """Tokens of four prompts, decoded by the job's engine."""
    loaded = pair.load(config)
    options = Sampling(**config.sampling.options)
    requests = [Request(f"{i}", *toys.prompt(family, i), options) for i in range(4)]
    done = {completion.sample_id: completion for completion in loaded.plain_engine(2).run(requests)}
    return [done[request.sample_id].token_ids for request in requests]


@torch.inference_mode()
def generated(target: Path, family: str = "llama", **options: Any) -> list[tuple[int, ...]]:
    """Tokens of the same prompts by `generate`, which reads the checkpoint's settings itself."""
    kind: Any = transformers.AutoModelForCausalLM if family == "llama" else transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(target)
    outputs = []
    for i in range(4):
        inputs = toys.front_end(family).encode(*toys.prompt(family, i))
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False, **options)
        outputs.append(tuple(out[0, inputs["input_ids"].shape[1] :].tolist()))
    return outputs


def test_every_setting_of_transformers_has_one_entry() -> None:
    assert SETTINGS.keys() == (OWN_FIELDS - METADATA) | MODEL_FIELDS | {"custom_generate"}
    names = {setting.key or name for name, setting in SETTINGS.items() if setting.use in ("processor", "sampling")}
    assert names <= SamplingConfig.model_fields.keys()
    assert all(setting.note for setting in SETTINGS.values() if setting.use in ("none", "refused", "sampler"))


def legacy(config: dict[str, Any]) -> None:
    config.update(repetition_penalty=1.7, min_length=9)


def nested(config: dict[str, Any]) -> None:
    config["text_config"].update(no_repeat_ngram_size=1)


CASES: dict[str, tuple[Any, str, Any]] = {
    "processors": (PROCESSED, "llama", lambda _: None),
    "with images": (PROCESSED, "llava", lambda _: None),
    "both minima": ({"min_new_tokens": 3, "min_length": 30, "eos_token_id": [*range(20, 60)]}, "llama", lambda _: None),
    "keys of config.json": (None, "llama", legacy),
    "keys of a nested config": (None, "llava", nested),
    "keys of config.json beside the file": ({"suppress_tokens": [*range(20)]}, "llama", legacy),
}


@pytest.mark.parametrize("case", list(CASES))
def test_tokens_are_those_of_generate_with_the_checkpoints_settings(case: str, saved: Path, tmp_path: Path) -> None:
    settings, family, config = CASES[case]
    target = written(saved, tmp_path, settings, family, config)
    got = decoded(resolved(job(target)), family)
    assert got == generated(target, family)
    assert got != generated(saved / family, family), "the settings change nothing"


def test_values_of_the_job_win(saved: Path, tmp_path: Path) -> None:
    target = written(saved, tmp_path, PROCESSED)
    plain = {
        name: SamplingConfig.model_fields[name].default
        for name in PROCESSED.keys() & SamplingConfig.model_fields.keys()
    }
    assert decoded(resolved(job(target, json.loads(json.dumps(plain)))), "llama") == generated(saved / "llama")
    kept = resolved(job(target, {"repetition_penalty": 2.5, "suppress_tokens": []}))
    assert (kept.sampling.repetition_penalty, kept.sampling.suppress_tokens) == (2.5, ())
    assert kept.sampling.bad_words_ids == ((9, 11), (5,))
    assert decoded(kept) == generated(target, repetition_penalty=2.5, suppress_tokens=[])
    ignored = resolved(job(target, {"ignored_settings": [*PROCESSED]}))
    assert decoded(ignored) == generated(saved / "llama")


INERT = {
    "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.5, "num_beam_groups": 1, "max_length": 7,
    "renormalize_logits": True, "remove_invalid_values": True, "prompt_lookup_num_tokens": 3, "num_assistant_tokens": 2,
    "output_scores": True, "return_dict_in_generate": False, "temperature": 0.5, "top_k": 3,
    "penalty_alpha": 0.0, "guidance_scale": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "num_beams": 1,
    "encoder_repetition_penalty": 1.0, "token_healing": False, "top_h": 0.4, "custom_of_a_model": 3,
}  # fmt: skip


def test_settings_without_effect_change_no_token(saved: Path, tmp_path: Path) -> None:
    target = written(saved, tmp_path, INERT)
    config = job(target)
    assert resolved(config) is config
    assert decoded(config) == generated(target) == generated(saved / "llama")


REFUSED: dict[str, Any] = {
    "num_beams": 4, "penalty_alpha": 0.6, "guidance_scale": 2.0, "max_time": 3.0, "stop_strings": ["w9"],
    "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 3, "token_healing": True, "is_assistant": True,
    "exponential_decay_length_penalty": [5, 1.1], "dola_layers": "high", "cache_implementation": "quantized",
    "watermarking_config": {"greenlist_ratio": 0.25}, "force_words_ids": [[5]], "no_repeat_ngram_window_size": 9,
}  # fmt: skip


def test_unsupported_settings_are_refused_by_name_and_can_be_ignored(saved: Path, tmp_path: Path) -> None:
    target = written(saved, tmp_path, REFUSED)
    with pytest.raises(ConfigError) as caught:
        pair.check(job(target))
    message = str(caught.value)
    assert message.startswith(f"model.target: {target}: its generation settings ask for ")
    assert all(f"{name} " in message for name in REFUSED)
    assert "num_beams 4 (beam search)" in message
    listed = message.rpartition("set sampling.ignored_settings: [")[2].rstrip("]")
    assert set(listed.split(", ")) == REFUSED.keys()
    settings = pair.check(job(target, {"ignored_settings": [*REFUSED]})).generation
    assert settings.unused == dict.fromkeys(REFUSED, "sampling.ignored_settings")


def test_a_misspelt_name_is_no_setting(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sampling\.ignored_settings: 'num_beam' is no generation setting"):
        pair.check(job(saved / "llama", {"ignored_settings": ["num_beam"]}))


def test_strings_that_end_texts_can_be_replaced_by_those_of_the_job(saved: Path, tmp_path: Path) -> None:
    target = written(saved, tmp_path, {"stop_strings": "w9"})
    with pytest.raises(ConfigError, match=r"stop_strings w9 .strings that end texts, as `sampling\.stop`"):
        pair.check(job(target))
    assert pair.check(job(target, {"stop": ["w9"]})).generation.unused == {"stop_strings": "sampling.stop is set"}


@pytest.mark.parametrize(
    ("settings", "own", "expected"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}, {}, (0.7, 20, 0.8, 0.1)),
        ({"do_sample": True}, {}, (1.0, 50, 1.0, 0.0)),  # the default of `generate`
        ({"temperature": 0.7, "top_k": 20}, {}, (0.0, 0, 1.0, 0.0)),
        ({}, {"temperature": 0.5}, (0.5, 50, 1.0, 0.0)),
        ({"do_sample": True, "top_k": 20, "top_p": 0.8}, {"temperature": 0.0}, (0.0, 0, 1.0, 0.0)),
        ({"do_sample": True, "top_k": 20, "top_p": 0.8}, {"top_k": 0}, (1.0, 0, 0.8, 0.0)),
    ],
)
def test_sampling_of_the_checkpoint_is_used_only_if_the_job_enables_it(
    settings: dict[str, Any], own: dict[str, Any], expected: tuple[float, ...]
) -> None:
    def drawn(sampling: SamplingConfig) -> tuple[float, ...]:
        used = resolve(sampling, settings, "here").sampling or sampling
        return used.temperature, used.top_k, used.top_p, used.min_p

    given = validate(SamplingConfig, {**own, "from_checkpoint": True}, "here")
    assert drawn(given) == expected
    plain = validate(SamplingConfig, own, "here")
    assert drawn(plain) == (plain.temperature, plain.top_k, plain.top_p, plain.min_p)


def test_other_samplers_are_refused_where_rows_are_sampled() -> None:
    asked = {"do_sample": True, "typical_p": 0.5}
    for given in ({}, {"temperature": 0.5}, {"from_checkpoint": True, "temperature": 0.0}):
        sampling = resolve(validate(SamplingConfig, given, "here"), asked, "here")
        assert "typical_p" in sampling.unused, given
    with pytest.raises(ConfigError, match=r"typical_p 0\.5 .locally typical sampling., which is not built"):
        resolve(SamplingConfig(from_checkpoint=True), asked, "here")
    with pytest.raises(ConfigError, match="typical_p"):
        resolve(SamplingConfig(from_checkpoint=True, temperature=0.0), asked, "here", samples=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": -1.0}, "its generation settings: repetition_penalty: Input should be greater than 0"),
        ({"no_repeat_ngram_size": "2"}, "its generation settings: no_repeat_ngram_size: Input should be a valid int"),
        ({"sequence_bias": {"(1, 2)": 1.0}}, "its generation settings: sequence_bias: Input should be a valid array"),
        ({"bad_words_ids": [[5], [70]]}, r"sampling\.bad_words_ids: the target has no token 70, but 64 tokens"),
        ({"forced_eos_token_id": [64]}, r"sampling\.forced_eos_token_id: the target has no token 64"),
        ({"suppress_tokens": 5}, "its generation settings cannot be read: 'int' object is not iterable"),
        ({"begin_suppress_tokens": 5}, "its generation settings: begin_suppress_tokens: Input should be a valid array"),
        ({"num_return_sequences": 2}, "its generation settings cannot be read: Greedy methods .*num_return_sequences"),
    ],
)
def test_invalid_settings_are_refused_by_name(
    settings: dict[str, Any], message: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        pair.check(job(written(saved, tmp_path, settings)))


def test_a_broken_file_is_refused_and_not_taken_for_none(saved: Path, tmp_path: Path) -> None:
    target = written(saved, tmp_path, {})
    (target / "generation_config.json").write_text('{"repetition_penalty": ')
    with pytest.raises(ConfigError, match=r"its generation_config\.json cannot be read: it is not valid JSON"):
        pair.check(job(target))


def test_a_file_that_is_no_settings_file_is_refused_unread(saved: Path, tmp_path: Path) -> None:
    target = written(saved, tmp_path, None)
    os.mkfifo(target / "generation_config.json")
    with pytest.raises(ConfigError, match=r"generation_config\.json: it is no file of at most 16 MiB"):
        read_active("model.target", job(target).model.target)
    (target / "generation_config.json").unlink()
    (target / "generation_config.json").write_text("{" + " " * (1 << 24) + "}")
    with pytest.raises(ConfigError, match=r"generation_config\.json: it is no file of at most 16 MiB"):
        read_active("model.target", job(target).model.target)


def test_code_in_place_of_generate_is_refused_where_remote_code_may_run(saved: Path, tmp_path: Path) -> None:
    target = written(saved, tmp_path, {})
    (target / "custom_generate").mkdir()
    (target / "custom_generate/generate.py").write_text("def generate(model, **options): ...\n")
    assert pair.check(job(target)).generation == Generation()
    model = {"target": {"path": str(target), "allow_remote_code": True}}
    with pytest.raises(ConfigError, match=r"custom_generate True .code of the checkpoint in place of `generate`.,"):
        pair.check(job(target, model=model))


def test_a_structure_takes_no_minimum_length(saved: Path, tmp_path: Path) -> None:
    target = written(saved, tmp_path, {"min_new_tokens": 4})
    grammars.tokenizer().save_pretrained(target)
    choices = {"output": {"choices": ["ab"]}}
    with pytest.raises(ConfigError, match="ask for min_new_tokens 4, and the structure of output decides where"):
        pair.check(job(target, **choices))
    pair.check(job(target, {"min_new_tokens": 0}, **choices))
    pair.check(job(target, {"ignored_settings": ["min_new_tokens"]}, **choices))
    with pytest.raises(ConfigError, match=r"sampling\.min_length: the structure of output decides where a text ends"):
        job(target, {"min_length": 4}, **choices)


def test_a_plan_names_requested_settings_and_used_settings(saved: Path, tmp_path: Path) -> None:
    asked = {"min_new_tokens": 4, "do_sample": True, "top_p": 0.8, "bad_words_ids": [[5]], "temperature": 1.0}
    target = written(saved, tmp_path, asked | {"no_repeat_ngram_size": 2, "suppress_tokens": [*range(40, 60)]})
    assert pair.check(job(target, {"no_repeat_ngram_size": 0})).generation.lines() == {
        "settings": "the target asks for min_new_tokens 4, do_sample True, top_p 0.8, no_repeat_ngram_size 2, "
        "bad_words_ids [[5]], suppress_tokens [20 entries]",
        "used": "min_new_tokens 4, bad_words_ids [[5]], suppress_tokens [20 entries]; not do_sample, top_p "
        "(sampling.from_checkpoint is false); not no_repeat_ngram_size (sampling.no_repeat_ngram_size is set)",
    }
    assert pair.check(job(saved / "llama")).generation == Generation()


def test_targets_without_generation_settings_keep_the_content_of_old_outputs(saved: Path, tmp_path: Path) -> None:
    names = {"max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "ignore_eos"}
    plain = resolved(job(saved / "llama", {"from_checkpoint": True, "ignored_settings": ["num_beams"]}))
    assert plain.content({})["sampling"].keys() == names
    assert plain.fingerprint({}) == job(saved / "llama").fingerprint({})
    asking = resolved(job(written(saved, tmp_path, {"repetition_penalty": 1.05, "min_new_tokens": 4})))
    assert asking.content({})["sampling"].keys() == names | {"min_new_tokens"}
    assert asking.content({})["sampling"]["repetition_penalty"] == 1.05
    again = validate(CaptionJobConfig, asking.resolved(), "record")
    assert resolved(again).sampling == asking.sampling


def test_a_benchmark_uses_the_logits_processors_and_ignores_unsupported_settings(saved: Path, tmp_path: Path) -> None:
    target = job(written(saved, tmp_path, PROCESSED | {"num_beams": 3})).model.target
    options = measured_options("target", target, 64)
    assert (options["repetition_penalty"], options["min_new_tokens"], options["temperature"]) == (1.4, 4, 0.0)
    Sampling(**options)
