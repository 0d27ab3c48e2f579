"""Lossless methods on SmolLM2-135M-Instruct and real text, run by `make test-real`.

The oracle of greedy outputs is transformers' `generate` of the target alone, one prompt at a time; that of sampled
outputs is `decoding.reference`, and plain sampling for methods with drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.loading.pair import load
from benchmarks.real.text import DRAFTED, METHODS, SAMPLED_ONLY, decode, job_of, read_prompts, requests_of
from decoding import Sampling
from jobs import caption
from models import forward_check
from models.kv.lanes import LaneModel
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.target import Target
from zoo.real import __main__ as make_real
from zoo.real.model import WEIGHTS_SHA256, ensure, weights_sha256

pytestmark = pytest.mark.real
TARGET = Path("out/real/target")
NUM_PROMPTS, NUM_TOKENS = 12, 32


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    assert make_real.main([]) == 0


@pytest.fixture(scope="module")
def oracle(made: None) -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


def test_a_second_call_converts_nothing() -> None:
    assert ensure(TARGET) is False


def test_written_weights_are_those_of_the_package(oracle: Any) -> None:
    assert weights_sha256(oracle.state_dict()) == WEIGHTS_SHA256


def test_the_model_writes_sensible_text(oracle: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = oracle.generate(**inputs, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("name", [name for name in (*METHODS, *DRAFTED) if name not in SAMPLED_ONLY])
def test_greedy_outputs_equal_generate_and_sampled_ones_plain_sampling(name: str, oracle: Any) -> None:
    pair, plain = (load(job_of(job, "float32")) for job in (name, "plain"))
    prompts = read_prompts(pair, NUM_PROMPTS)
    done, _ = decode(pair, requests_of(prompts, Sampling(max_new_tokens=NUM_TOKENS)), 5)
    for prompt, completion in zip(prompts, done, strict=True):
        ids = pair.target.front_end.encode(prompt, ())["input_ids"]
        output = oracle.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=2)
        assert list(completion.token_ids) == output[0, ids.shape[1] :].tolist()
    requests = requests_of(prompts, Sampling(max_new_tokens=NUM_TOKENS, temperature=1.0))
    drafted, _ = decode(pair, requests, 5)
    sampled, _ = decode(plain, requests, 3)
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in sampled]


def test_the_job_file_runs(tmp_path: Path) -> None:
    config = "configs/jobs/real_text.yaml"
    assert caption.main(["--config", config, f"sink.path={tmp_path / 'out'}", "--limit", "40"]) == 0


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_loading_in_bfloat16_refuses_shifted_positions_and_not_rounding(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LaneModel.forward

    def shifted(self: LaneModel, slots: Any, tokens: Any, depth: Any, *rest: Any, **named: Any) -> Any:
        is_step = tokens.shape[1] == forward_check.NUM_NODES
        return forward(self, slots, tokens, depth + shift if is_step else depth, *rest, **named)

    monkeypatch.setattr(LaneModel, "forward", shifted)
    if shift:
        with pytest.raises(CheckpointError, match="it ignores the positions"):
            Target.load(CheckpointRef(str(TARGET)), "bfloat16", "cpu")
    else:
        Target.load(CheckpointRef(str(TARGET)), "bfloat16", "cpu")
