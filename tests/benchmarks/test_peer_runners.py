"""The runners of this engine and of transformers produce the target's output; a drafter changes only the speed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.harness.process import Work
from benchmarks.harness.verdict import Verdict, judge
from benchmarks.peers.engine_peer import EngineRunner
from benchmarks.peers.transformers_peer import GenerateRunner, cut
from benchmarks.peers.work import key_of, make_reference, reference_of
from tests.toys.text import llama, text_config
from tests.toys.weights import make_tokenizer

PROMPTS = ["w5 w6", "w7 w8 w9 w10 w11", "w12", "w40 w41 w42", "w6 w6 w6", "w13 w50"]
NUM_NEW_TOKENS = 12
ENDS = (2, 44)
"""The second occurs in the toy's output."""
IS_EAGER = True
"""Compiling takes longer than decoding with the toys."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """A toy target, and as its drafter a copy that is a little off."""
    folder = tmp_path_factory.mktemp("pair")
    target = copy.deepcopy(llama(3))
    target.generation_config.eos_token_id = list(ENDS)
    drafter = LlamaForCausalLM(text_config()).eval()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for own, other in zip(drafter.parameters(), target.parameters(), strict=True):
            own.copy_(other + 0.01 * torch.randn(other.shape, generator=noise))
    tokenizer = make_tokenizer()
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    settings = {"dtype": "float32", "threads": 1, "gamma": 3, "max_batch": 4, "max_context_tokens": 64}
    pair = {"target": str(folder / "target"), "drafter": str(folder / "drafter")}
    limits = {"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": False}
    return Work(**pair, **settings, **limits, prompt_texts=PROMPTS, prompt_ids=ids)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(work: Work) -> list[dict[str, list[float]]]:
    return make_reference(work)


def test_the_reference_is_the_targets_own_greedy_output(work: Work, reference: list[dict[str, list[float]]]) -> None:
    model = llama(3)
    for ids, result in zip(work.prompt_ids, reference, strict=True):
        made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NUM_NEW_TOKENS, pad_token_id=0)
        tokens = cut(made[0, len(ids) :].tolist(), frozenset(ENDS))
        assert result["tokens"] == tokens
        logits = model(made[:, : len(ids) + len(tokens)]).logits[0, len(ids) - 1 : -1]
        best = logits.topk(2).values
        assert torch.allclose(torch.tensor(result["top"]), best[:, 0], atol=1e-4)
        assert torch.allclose(torch.tensor(result["gap"]), best[:, 0] - best[:, 1], atol=1e-4)
    lengths = [len(result["tokens"]) for result in reference]
    assert min(lengths) < max(lengths) == NUM_NEW_TOKENS


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("mode", ["plain", "chain", "controlled"])
def test_this_engine_produces_the_targets_output(
    work: Work, reference: list[dict[str, list[float]]], mode: str, batch: int
) -> None:
    runner = EngineRunner(work, mode, IS_EAGER)
    first, again = runner.warm(batch, len(PROMPTS)), runner.run(batch, len(PROMPTS))
    assert judge(again.outputs, reference, "float32") == Verdict(6, 6, 0, 0, 0.0)
    assert len(first.outputs) == min(2 * batch, len(PROMPTS))
    assert first.outputs == again.outputs[: len(first.outputs)]
    if mode == "plain":
        assert (again.num_steps, again.num_accepted) == (0, 0)
    elif mode == "chain":
        assert again.num_accepted > again.num_steps > 0


@pytest.mark.parametrize(("mode", "batch"), [("eager", 1), ("eager", 4), ("assisted", 1), ("assisted_confident", 1)])
def test_transformers_produces_the_targets_output(
    work: Work, reference: list[dict[str, list[float]]], mode: str, batch: int
) -> None:
    runner = GenerateRunner(work, mode)
    drafted: list[object] = []
    if "assistant_model" in runner._options:
        runner._options["assistant_model"].register_forward_pre_hook(lambda *_: drafted.append(None))
    assert len(runner.warm(batch, len(PROMPTS)).outputs) == batch
    drafted.clear()
    done = runner.run(batch, len(PROMPTS))
    assert judge(done.outputs, reference, "float32") == Verdict(6, 6, 0, 0, 0.0)
    if mode == "eager":
        assert (done.num_steps, done.num_accepted) == (0, 0)
    else:
        # Every forward of the target gives one token of its own beside the accepted drafts.
        assert done.num_steps + done.num_accepted == sum(map(len, done.outputs))
        assert done.num_steps > 0
        assert len(drafted) <= work.gamma * done.num_steps
        assert done.num_accepted > (done.num_steps if mode == "assisted" else 0)


def test_an_engine_with_other_prompt_tokens_is_refused_as_a_peer(work: Work) -> None:
    with pytest.raises(ValueError, match="the other peers as"):
        EngineRunner(replace(work, prompt_ids=[[9], *work.prompt_ids[1:]]), "plain", IS_EAGER)


def test_a_reference_belongs_to_its_prompts_limits_and_weights(work: Work, tmp_path: Path) -> None:
    keys = {key_of(work)}
    keys.add(key_of(replace(work, max_new_tokens=13)))
    keys.add(key_of(replace(work, ignore_eos=True)))
    keys.add(key_of(replace(work, prompt_ids=work.prompt_ids[::-1])))
    keys.add(key_of(replace(work, target=work.drafter)))
    assert len(keys) == 5
    assert key_of(replace(work, dtype="bfloat16", threads=2, drafter="elsewhere")) in keys
    assert reference_of(work, tmp_path) == make_reference(work)
    (tmp_path / f"reference-{key_of(work)}.json").write_text("[]")
    assert reference_of(work, tmp_path) == []
