"""This engine as a peer: `python -m benchmarks.peer_engine WORK plain|chain|controlled`, run by `benchmarks.peers`.

Requests go through `Engine.run` like any job's: the prompts are texts, slots are refilled as they fall free.
"""

from __future__ import annotations

import platform
import sys
import time

import torch
import transformers

from actors.loading.method import build_method
from actors.loading.pair import load_target
from benchmarks.peer_process import Outcome, Work, serve
from configs.drafters import ModelDrafter
from configs.method import MeasuredController, Method, NoController
from configs.schema import Checkpoint
from configs.trees import ChainTree
from decoding import Engine, Request, Sampling
from models.target import Target


def choose_method(mode: str, gamma: int) -> Method:
    """`plain`, a `chain` of `gamma` drafts, or one as deep as a `controlled` engine finds worth while."""
    if mode == "plain":
        return Method()
    controller = MeasuredController() if mode == "controlled" else NoController()
    return Method(drafter=ModelDrafter(), tree=ChainTree(length=gamma), controller=controller)


class EngineRunner:
    """One pair, and an engine for each batch size, made when it is first asked for.

    Its models are compiled, unless it `is_eager`.
    """

    def __init__(self, work: Work, mode: str, is_eager: bool = False) -> None:
        torch.set_num_threads(work.threads)
        self._work = work
        self._target = load_target(Checkpoint(path=work.target, dtype=work.dtype, device="cpu"), "target")
        self._drafter: Target | None = None
        if mode != "plain":
            self._drafter = load_target(Checkpoint(path=work.drafter, dtype=work.dtype, device="cpu"), "drafter")
        models = [model for model in (self._target, self._drafter) if model is not None]
        can_be = [] if is_eager else [model.compile() for model in models]
        self._step = "compiled" if can_be and all(can_be) else "eager"
        self._choice = choose_method(mode, work.gamma)
        self._engines: dict[int, Engine] = {}
        sampling = Sampling(max_new_tokens=work.max_new_tokens, ignore_eos=work.ignore_eos)
        self._requests = [
            Request(str(number), text, sampling=sampling) for number, text in enumerate(work.prompt_texts)
        ]
        for text, ids in zip(work.prompt_texts, work.prompt_ids, strict=True):
            own = self._target.front_end.encode(text, ())["input_ids"][0].tolist()
            if own != ids:
                raise ValueError(f"this engine reads {text!r} as {own}, the other peers as {ids}")

    def versions(self) -> dict[str, str]:
        """Of what computes, and how."""
        return {
            "step": self._step,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def warm(self, batch: int, num_requests: int) -> Outcome:
        """One full batch, which makes the memory and compiles; then two, which fill slots that fall free
        and drain, as a pass does."""
        self.run(batch, min(batch, num_requests))
        return self.run(batch, min(2 * batch, num_requests))

    def run(self, batch: int, num_requests: int) -> Outcome:
        """See `benchmarks.peer_process.Runner`.

        Raises:
            RuntimeError: a request gave an error.
        """
        if batch not in self._engines:
            method = build_method(self._choice, self._drafter, self._target)
            self._engines[batch] = Engine(self._target, method, batch, self._work.max_context_tokens)
        start = time.perf_counter()
        done = list(self._engines[batch].run(self._requests[:num_requests]))
        seconds = time.perf_counter() - start
        if broken := [one.error for one in done if one.error is not None]:
            raise RuntimeError(f"{len(broken)} requests failed: {broken[0]}")
        by_id = {one.sample_id: list(one.token_ids) for one in done}
        told = [one.telemetry for one in done] if self._drafter is not None else []
        return Outcome(
            seconds,
            [by_id[str(number)] for number in range(num_requests)],
            sum(one.num_spec_steps for one in told),
            sum(one.num_accepted_draft_tokens for one in told),
        )


if __name__ == "__main__":
    sys.exit(serve(EngineRunner))
