"""Restricted draft vocabularies: legal drafters, and the built parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.loading import pair
from actors.loading.method import build_method
from configs.drafters import DraftVocabularyConfig
from configs.load import ConfigError, load_job
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from decoding.drafters import EagleDrafter, MedusaDrafter, ModelDrafter
from models.loading.vocabulary import SlicedHead, TokenCount, write_tokens
from tests import toys
from tests.conformance import heads

ROOT = Path(__file__).resolve().parents[2]


def method(kind: str = "model", **vocabulary: Any) -> MethodConfig:
    tree = {"kind": "chain", "length": 3}
    return MethodConfig.model_validate_json(
        json.dumps({"drafter": {"kind": kind, "vocabulary": vocabulary}, "tree": tree})
    )


def listed(folder: Path, *ids: int) -> str:
    """A list of the toys' tokens, the most frequent first."""
    file = folder / "tokens.json"
    write_tokens(file, [TokenCount(number, f"w{number}", 100 - index) for index, number in enumerate(ids)], "toys")
    return str(file)


def kept(head: Any) -> list[int]:
    assert isinstance(head, SlicedHead)
    assert head.vocab_size == toys.VOCAB_SIZE
    return head.token_ids.tolist()


def model_head(config: MethodConfig) -> Any:
    drafter = build_method(config, toys.perturbed("llama", 0.02), toys.target("llama")).drafter
    assert isinstance(drafter, ModelDrafter)
    return drafter.model.head


@pytest.mark.parametrize(
    ("vocabulary", "reason"),
    [
        ({}, "give path, size or both"),
        ({"size": 0}, "greater than or equal to 1"),
        ({"size": "many"}, "valid integer"),
        ({"path": "s3://bucket/tokens.json"}, "is a URL; the list has to be a file that every machine sees"),
        ({"file": "tokens.json"}, "file"),
    ],
)
def test_a_choice_of_tokens_is_a_list_a_number_or_both(vocabulary: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        method(**vocabulary)


@pytest.mark.parametrize("kind", ["none", "lookup"])
def test_drafters_without_an_output_layer_have_no_vocabulary(kind: str) -> None:
    with pytest.raises(ValidationError, match=r"vocabulary"):
        method(kind, size=5)


def test_an_image_job_refuses_a_draft_vocabulary() -> None:
    overrides = ("method.drafter.vocabulary.size=100",)
    with pytest.raises(ConfigError, match="an image is made of codes"):
        load_job(SynthesizeJobConfig, ROOT / "configs/jobs/zoo_images_sd_chain.yaml", overrides)


def test_the_draft_vocabulary_is_the_list_its_first_tokens_or_the_lowest_ids_and_every_eos(tmp_path: Path) -> None:
    eos = sorted(toys.target("llama").eos_ids)
    path = listed(tmp_path, 40, 12, 30)
    assert kept(model_head(method(path=path))) == sorted([12, 30, 40, *eos])
    assert kept(model_head(method(path=path, size=2))) == sorted([12, 40, *eos])
    assert kept(model_head(method(size=10))) == sorted({*range(10), *eos})
    assert kept(model_head(method(size=10**9))) == list(range(toys.VOCAB_SIZE))


def test_building_a_method_with_a_draft_vocabulary_does_not_change_the_model(tmp_path: Path) -> None:
    model = toys.perturbed("llama", 0.02)
    whole = model.head
    build_method(method(size=10), model, toys.target("llama"))
    assert model.head is whole
    drafter = build_method(method(size=10), model, toys.target("llama")).drafter
    assert isinstance(drafter, ModelDrafter)
    assert drafter.model.vocab_size == model.vocab_size


def test_heads_on_the_target_are_kept_to_the_same_tokens() -> None:
    target = toys.target("llama")
    expected = sorted({*range(10), *target.eos_ids})
    eagle = build_method(method("eagle", size=10), heads.eagle("llama"), target).drafter
    assert isinstance(eagle, EagleDrafter)
    assert kept(eagle.head) == expected
    medusa = build_method(method("medusa", size=10), heads.medusa("llama"), target).drafter
    assert isinstance(medusa, MedusaDrafter)
    assert [kept(list(own.children())[-1]) for own in medusa.heads] == [expected] * heads.NUM_HEADS
    assert len(list(heads.medusa("llama")[0].parameters())) == len(list(medusa.heads[0].parameters()))


def job(folder: Path, path: str, **more: Any) -> CaptionJobConfig:
    target = folder / "target"
    if not target.exists():
        target.mkdir()
        toys.save("llama", target)
    checkpoint = {"path": str(target), "dtype": "float32", "device": "cpu"}
    return CaptionJobConfig.model_validate_json(
        json.dumps(
            {
                "source": {"kind": "images", "path": "pictures"},
                "prompt": "Describe.",
                "model": {"target": checkpoint, "drafter": checkpoint},
                "method": {"drafter": {"kind": "model", "vocabulary": {"path": path, **more}}},
                "sink": {"path": "out"},
            }
        )
    )


def test_a_token_list_is_checked_against_the_tokenizer_and_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    path = listed(tmp_path, 40, 12, 30)
    revision = pair.check(job(tmp_path, path)).revisions["vocabulary_0"]
    assert pair.check(job(tmp_path, path, size=2)).revisions["vocabulary_0"] != revision
    loaded = pair.load(job(tmp_path, path))
    assert loaded.info.revisions["vocabulary_0"] == revision
    drafter = loaded.engine(2).method.drafter
    assert set(kept(drafter.inner.model.head)) >= {12, 30, 40}  # type: ignore[attr-defined]


def test_a_list_of_another_tokenizer_is_refused_with_examples(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    write_tokens(file, [TokenCount(10, "w10", 9), TokenCount(11, "Ġthe", 8), TokenCount(99_999, "x", 7)], "others")
    with pytest.raises(ConfigError) as caught:
        pair.check(job(tmp_path, str(file)))
    message = str(caught.value)
    assert message.startswith(
        f"method.drafter.vocabulary.path: {file} was counted with another tokenizer: 2 ids differ"
    )
    assert "id 11 is 'Ġthe' there and 'w11' for the target; 99999 is 'x' there and None for the target" in message


def test_a_missing_list_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.drafter\.vocabulary\.path: .*gone\.json: it cannot be read"):
        pair.check(job(tmp_path, str(tmp_path / "gone.json")))


def test_a_bad_list_of_a_candidate_is_refused_by_the_candidates_dotted_path(tmp_path: Path) -> None:
    data = job(tmp_path, "unused").resolved()
    data["method"] = {"auto": {"candidates": [{"drafter": {"kind": "lookup"}}, data["method"]]}}
    data["method"]["auto"]["candidates"][1]["drafter"]["vocabulary"]["path"] = str(tmp_path / "gone.json")
    with pytest.raises(ConfigError, match=r"^method\.auto\.candidates\.1\.drafter\.vocabulary\.path: .*gone\.json"):
        pair.check(CaptionJobConfig.model_validate_json(json.dumps(data)))


def test_a_drafter_that_has_none_of_the_tokens_is_refused(tmp_path: Path) -> None:
    target = toys.target("llama")
    target.eos_ids = frozenset()
    model = toys.perturbed("llama", 0.02)
    model.head = type(model.head)(model.hidden_size, 8, bias=False)  # type: ignore[call-arg, arg-type]
    with pytest.raises(ConfigError, match="the drafter has 8 tokens, and none of the chosen ones"):
        build_method(method(path=listed(tmp_path, 40, 12)), model, target)


def test_a_vocabulary_without_a_list_is_valid() -> None:
    config = method(size=5).drafter
    assert getattr(config, "vocabulary") == DraftVocabularyConfig(size=5)  # noqa: B009
