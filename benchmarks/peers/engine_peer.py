"""Runs this engine as a peer: `python -m benchmarks.peers.engine_peer WORK MODE`."""

from __future__ import annotations

import sys
import time

import torch
import transformers

from actors.loading.method import build_method
from actors.loading.pair import SHARED_INPUT_BYTES, load_target
from benchmarks.harness.engines import encode, outcome_of, run_requests
from benchmarks.harness.process import Outcome, Work, serve, versions_of
from configs.drafters import LookupDrafterConfig, ModelDrafterConfig
from configs.method import MeasuredControllerConfig, MethodConfig, NoControllerConfig
from configs.schema import CheckpointConfig
from configs.trees import ChainTreeConfig
from decoding import Engine, Request, Sampling
from models.target import Target


def load_model(path: str, dtype: str) -> Target:
    return load_target(CheckpointConfig.model_validate({"path": path, "dtype": dtype, "device": "cpu"}), path)


def choose_method(mode: str, gamma: int) -> MethodConfig:
    """Build plain decoding (`plain`), a `chain` of `gamma` drafts, chains of `controlled` length, or `lookup`."""
    if mode == "plain":
        return MethodConfig()
    if mode == "lookup":
        return MethodConfig(drafter=LookupDrafterConfig(), tree=ChainTreeConfig(length=gamma))
    controller = MeasuredControllerConfig() if mode == "controlled" else NoControllerConfig()
    return MethodConfig(drafter=ModelDrafterConfig(), tree=ChainTreeConfig(length=gamma), controller=controller)


class EngineRunner:
    """A pair, compiled unless `is_eager`, with one engine per batch size."""

    def __init__(self, work: Work, mode: str, is_eager: bool = False) -> None:
        torch.set_num_threads(work.threads)
        self._work = work
        folders = [work.target, work.drafter] if mode in ("chain", "controlled") else [work.target]
        models = [load_model(path, work.dtype) for path in folders]
        for drafter in models[1:]:
            drafter.share_front_end(models[0], SHARED_INPUT_BYTES)  # as jobs do
        compiled = [] if is_eager else [model.compile() for model in models]
        self._step = "compiled" if compiled and all(compiled) else "eager"
        self._target = models[0]
        self._shares = len(models) > 1
        self._drafter = models[1] if self._shares else None
        self._choice = choose_method(mode, work.gamma)
        self._engines: dict[int, Engine] = {}
        sampling = Sampling(max_new_tokens=work.max_new_tokens, ignore_eos=work.ignore_eos)
        self._requests = [Request(str(number), text, (), sampling) for number, text in enumerate(work.prompt_texts)]
        ids = encode(self._target.front_end, work.prompt_texts)
        for text, actual, expected in zip(work.prompt_texts, ids, work.prompt_ids, strict=True):
            if actual != expected:
                raise ValueError(f"this engine reads {text!r} as {actual}, the other peers as {expected}")

    def versions(self) -> dict[str, str]:
        return {"step": self._step, **versions_of(torch, transformers)}

    def warm(self, batch: int, num_requests: int) -> Outcome:
        """Run one full batch, which allocates and compiles; then two, which refill and drain slots as a pass does."""
        self.run(batch, min(batch, num_requests))
        return self.run(batch, min(2 * batch, num_requests))

    def run(self, batch: int, num_requests: int) -> Outcome:
        """See `benchmarks.harness.process.serve`."""
        if batch not in self._engines:
            method = build_method(self._choice, self._drafter, self._target)
            self._engines[batch] = Engine(self._target, method, batch, self._work.max_context_tokens)
        self._target.front_end.keep(SHARED_INPUT_BYTES if self._shares else 0)  # drops the inputs of earlier passes
        start = time.perf_counter()
        done = run_requests(self._engines[batch], self._requests[:num_requests])
        return outcome_of(time.perf_counter() - start, done)


if __name__ == "__main__":
    sys.exit(serve(EngineRunner))
