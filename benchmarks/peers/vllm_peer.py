"""Runs vLLM as a peer: `python -m benchmarks.peers.vllm_peer WORK plain|draft_model|ngram`.

Runs in vLLM's own environment, so it imports only `benchmarks.harness.process` of this project. One engine serves every
batch size: at most `batch` requests are in it, and a finished one is replaced before the next step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
import vllm
from vllm import LLM, SamplingParams

from benchmarks.harness.process import Outcome, Work, serve, versions_of

NGRAM_MIN_TOKENS, NGRAM_MAX_TOKENS = 2, 4
STEPS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def speculation(work: Work, mode: str) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config`; None for plain decoding."""
    options: dict[str, dict[str, Any]] = {
        "draft_model": {"model": work.drafter},
        "ngram": {"prompt_lookup_min": NGRAM_MIN_TOKENS, "prompt_lookup_max": NGRAM_MAX_TOKENS},
    }
    return {"method": mode, "num_speculative_tokens": work.gamma} | options[mode] if mode in options else None


class VllmRunner:
    """One `LLM` without prefix caching, so that repeated passes cost the same."""

    def __init__(self, work: Work, mode: str) -> None:
        self._work = work
        self._speculates = mode != "plain"
        self._llm = LLM(
            model=work.target,
            dtype=work.dtype,
            max_model_len=work.max_context_tokens,
            max_num_seqs=work.max_batch,
            enable_prefix_caching=False,
            speculative_config=speculation(work, mode),
            disable_log_stats=not self._speculates,  # acceptance is in its counters only
            seed=0,
        )
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=work.max_new_tokens, ignore_eos=work.ignore_eos, detokenize=True
        )
        self._num_passes = 0

    def versions(self) -> dict[str, str]:
        return versions_of(torch, transformers, vllm)

    def warm(self, batch: int, num_requests: int) -> Outcome:
        """Run one full batch; compiled graphs have dynamic shapes."""
        return self.run(batch, min(batch, num_requests))

    def run(self, batch: int, num_requests: int) -> Outcome:
        """See `benchmarks.harness.process.serve`."""
        engine = self._llm.llm_engine
        before = self._counters()
        self._num_passes += 1
        outputs: dict[str, list[int]] = {}
        names = [f"{self._num_passes}/{number}" for number in range(num_requests)]
        start = time.perf_counter()
        num_added = 0
        while len(outputs) < num_requests:
            while num_added < num_requests and num_added - len(outputs) < batch:
                prompt = {"prompt_token_ids": self._work.prompt_ids[num_added]}
                engine.add_request(names[num_added], prompt, self._sampling)
                num_added += 1
            for done in engine.step():
                if done.finished:
                    outputs[done.request_id] = list(done.outputs[0].token_ids)
        seconds = time.perf_counter() - start
        after = self._counters()
        steps, accepted = (after[name] - before[name] for name in (STEPS, ACCEPTED))
        return Outcome(seconds, [outputs[name] for name in names], steps, accepted)

    def _counters(self) -> dict[str, int]:
        counts = {STEPS: 0, ACCEPTED: 0}
        if self._speculates:
            counts |= {metric.name: int(metric.value) for metric in self._llm.get_metrics() if metric.name in counts}
        return counts


if __name__ == "__main__":
    sys.exit(serve(VllmRunner))
