"""A pair that does not match is refused before weights are read, with the dotted path of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.loading import pair
from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from pipeline.run.resume import refuse_other_content
from pipeline.storage.output_dir import OutputDir
from tests import toys


def save_with_words(folder: Path, words: dict[str, int], family: str = "llama") -> Path:
    """A toy checkpoint whose tokenizer has the given vocabulary."""
    folder.mkdir()
    toys.save(family, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = words
    file.write_text(json.dumps(tokenizer))
    return folder


def words() -> dict[str, int]:
    return dict(toys.make_tokenizer().get_vocab())


def job(target: Path, drafter: Path | None) -> CaptionJobConfig:
    model: dict[str, object] = {"target": {"path": str(target), "dtype": "float32", "device": "cpu"}}
    if drafter is not None:
        model["drafter"] = {"path": str(drafter), "dtype": "float32", "device": "cpu"}
    return CaptionJobConfig.model_validate(
        {
            "source": {"kind": "images", "path": "pictures"},
            "prompt": "Describe.",
            "model": model,
            "method": {"drafter": {"kind": "none" if drafter is None else "model"}},
            "sink": {"path": "out"},
        }
    )


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_with_words(tmp_path / "target", words())


def test_a_pair_with_one_vocabulary_is_taken_and_each_side_is_named_with_its_revision(
    target: Path, tmp_path: Path
) -> None:
    drafter = save_with_words(tmp_path / "drafter", words())
    info = pair.check(job(target, drafter))
    assert info.target_id == f"{target}@{info.revisions['target']}"
    assert info.drafter_id == f"{drafter}@{info.revisions['drafter']}"


@pytest.mark.parametrize("template", ["{{ bos_token }}", ""])
def test_outputs_whose_prompts_had_more_special_tokens_are_of_another_configuration(
    template: str, target: Path
) -> None:
    """A resume names `revisions.special_tokens`; with unchanged prompts the configuration has no such key."""
    file = target / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(tokenizer))
    (target / "chat_template.jinja").write_text(template + "{{ messages[0].content }}")
    revisions = pair.check(job(target, None)).revisions
    assert revisions.get("special_tokens") == (None if template else "as apply_chat_template")
    before = job(target, None).content({"target": revisions["target"]})
    if template:
        assert job(target, None).content(revisions) == before
    else:
        with pytest.raises(ConfigError, match=r"revisions\.special_tokens: absent then, 'as apply_chat_template' now"):
            refuse_other_content(before, job(target, None).content(revisions), OutputDir(str(target)))


def test_a_drafter_with_other_token_ids_is_refused_with_examples(target: Path, tmp_path: Path) -> None:
    swapped = words()
    swapped["w10"], swapped["w11"] = swapped["w11"], swapped["w10"]
    drafter = save_with_words(tmp_path / "drafter", swapped)
    with pytest.raises(ConfigError) as caught:
        pair.check(job(target, drafter))
    message = str(caught.value)
    assert message.startswith(f"model.drafter: {drafter} does not share the target's vocabulary: 2 ids differ")
    assert "id 10 is 'w10' for the target and 'w11' for the drafter" in message


def test_a_drafter_with_a_few_extra_tokens_is_accepted(target: Path, tmp_path: Path) -> None:
    drafter = save_with_words(tmp_path / "drafter", words() | {"<extra>": toys.VOCAB_SIZE})
    assert pair.check(job(target, drafter)).drafter_id


def test_a_drafter_that_lacks_too_many_tokens_is_refused(target: Path, tmp_path: Path) -> None:
    few = {token: number for token, number in words().items() if number < 20}
    drafter = save_with_words(tmp_path / "drafter", few)
    with pytest.raises(ConfigError, match="knows only 20 of the target's 64 tokens, too few to draft"):
        pair.check(job(target, drafter))


def test_errors_of_target_and_drafter_are_distinguished(target: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(ConfigError, match=r"^model\.target: .*absent: no such folder"):
        pair.check(job(absent, target))
    with pytest.raises(ConfigError, match=r"^model\.drafter: .*absent: no such folder"):
        pair.check(job(target, absent))


def test_torn_weights_are_refused_by_the_check_and_at_loading(target: Path, tmp_path: Path) -> None:
    drafter = save_with_words(tmp_path / "drafter", words())
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    wanted = job(target, drafter)
    for read in (pair.check, pair.load):
        with pytest.raises(ConfigError, match=r"^model\.drafter: .*model\.safetensors is torn"):
            read(wanted)


def test_a_pair_without_a_drafter_loads_its_target_alone(target: Path) -> None:
    loaded = pair.load(job(target, None))
    assert loaded.drafter is None
    assert loaded.drafter_id == ""
    assert loaded.target.vocab_size == toys.VOCAB_SIZE


def test_a_missing_captioner_is_refused_by_the_dotted_path_of_its_context(target: Path, tmp_path: Path) -> None:
    drafter = save_with_words(tmp_path / "drafter", words())
    data = job(target, drafter).resolved()
    data["method"]["contexts"] = [{"kind": "full"}, {"kind": "caption", "path": str(tmp_path / "nowhere")}]
    with pytest.raises(ConfigError, match=r"method\.contexts\.1: .*nowhere"):
        pair.check(CaptionJobConfig.model_validate_json(json.dumps(data)))
