"""Checks of models with recurrent layers. Tests run them, and planted faults must make them fail.

Outputs are compared with transformers' `generate`, or with the slow reference if they are sampled; states with those of
a fresh prefill, which runs the rule for chunks instead of the replayed rule for single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contracts import Drafter, PrefillOutput, VerificationOutput
from decoding.drafters import ModelDrafter
from decoding.drafters.line import follow_line
from decoding.tree import AcceptanceResult, Frontier
from decoding.trees import Chain
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch
from tests import toys
from tests.conformance import checks
from tests.conformance.erratic import unsettled
from tests.conformance.methods import METHODS, MODES

FAMILIES = tuple(toys.RECURRENT)
KINDS = ("qwen3_next", "lfm2", "bamba")
"""One family of each rule."""
VISUAL = tuple(family for family in FAMILIES if toys.takes_images(family))
CLOSE = {"atol": 2e-3, "rtol": 1e-3}


class Contrary(Drafter):
    """Drafts tokens that the target does not generate, for prompts whose outputs are known."""

    name = "contrary"

    def __init__(self, outputs: dict[tuple[int, ...], Sequence[int]]) -> None:
        self._outputs = outputs
        self._lines: dict[int, Tensor] = {}
        self._length: dict[int, int] = {}

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        for slot, output in zip(slots.ids, prefill_outputs, strict=True):
            tokens = self._outputs[tuple(output.prefix.token_ids.tolist())]
            self._lines[slot] = (torch.tensor([*tokens, *[5] * 16]) + 1) % toys.VOCAB_SIZE
            self._length[slot] = 1

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        lines = [self._lines[slot][self._length[slot] : self._length[slot] + 8] for slot in slots.ids]
        return follow_line(frontier, torch.stack(lines), toys.VOCAB_SIZE)

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        for slot, number in zip(verification.slots.ids, result.n.tolist(), strict=True):
            self._length[slot] += number


def long_prompts(family: str, count: int, sampling: Sampling) -> list[Request]:
    """Texts of 2 to 150 words, longer and shorter than the chunks of the rules."""
    generator = np.random.default_rng(3)
    lengths = [150, 2, 64, 65, 63, 9, 128, 31, 7][:count]
    return [
        Request(f"long-{i}", " ".join(f"w{word}" for word in generator.integers(5, 64, length)), (), sampling, seed=4)
        for i, length in enumerate(lengths)
    ]


def check_requests(
    family: str, method: Method, slots: int, wanted: Sequence[Request], capacity: int = 160
) -> dict[str, Any]:
    """Outputs equal the oracle's, token for token; returns the completions."""
    target = toys.target(family)
    done = checks.run(Engine(target, method, slots, capacity), wanted)
    for request in wanted:
        oracle = checks.generated if request.sampling.temperature == 0 else checks.referenced
        expected = oracle(family, request, frozenset() if request.sampling.ignore_eos else target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id
        checks.check_telemetry(done[request.sample_id])
    return done


def check_method(name: str, family: str, slots: int, mode: str, count: int = 9) -> float:
    """A method on rows that enter and end in mid-run; returns the mean acceptance length."""
    wanted = checks.requests(family, count, MODES[mode])
    done = check_requests(family, METHODS[name][0](family), slots, wanted)
    return sum(completion.telemetry.mean_acceptance_length for completion in done.values()) / count


def check_long(family: str, name: str, slots: int = 4, count: int = 9) -> None:
    """Prompts across the borders of chunks, in ragged prefills."""
    wanted = long_prompts(family, count, Sampling(max_new_tokens=12))
    check_requests(family, METHODS[name][0](family), slots, wanted, 200)


def check_wrong_drafts(family: str, num_steps: int = 200, slots: int = 4) -> None:
    """Drafts that are all wrong, for many steps."""
    sampling = Sampling(max_new_tokens=num_steps + 1, ignore_eos=True)
    wanted = [Request(f"wrong-{i}", toys.prompt(family, i)[0], toys.prompt(family, i)[1], sampling) for i in range(4)]
    target = toys.target(family)
    outputs = {
        tuple(target.encode(request.prompt, request.images).token_ids.tolist()): checks.generated(
            family, request, frozenset()
        )
        for request in wanted
    }
    method = Method(Contrary(outputs), Chain(5), Exact())
    for completion in check_requests(family, method, slots, wanted, 320).values():
        assert completion.telemetry.num_spec_steps == num_steps
        assert completion.telemetry.num_accepted_draft_tokens == 0 < completion.telemetry.num_draft_tokens


def check_pauses(family: str, pattern: Sequence[int], slots: int = 3, name: str = "sd-chain") -> None:
    """Steps without drafts between steps with drafts, whose tokens the drafter catches up on."""
    wanted = checks.requests(family, 7, Sampling(ignore_eos=True), longest=44)
    check_requests(family, unsettled(METHODS[name][0](family), pattern=pattern), slots, wanted)


def check_states(family: str, drafter: str = "perturbed") -> None:
    """After every step, a next token has the hidden states that it has behind a fresh prefill of all tokens before it,
    for target and drafter."""
    target = toys.target(family)
    guess = checks.make_drafter(drafter, family)
    engine = Engine(target, Method(guess, Chain(4), Exact()), 3, 128)
    for request in checks.requests(family, 8):
        engine.submit(request)
    num_compared = 0
    while engine.has_work:
        engine.step()
        for slot, progress in enumerate(engine._slots.progress):
            if progress is None:
                continue
            request = progress.request
            prefix = target.encode(request.prompt, request.images, request.videos)
            compare_next(engine._lanes, slot, prefix, progress.token_ids[:-1])
            if isinstance(guess, ModelDrafter):
                held = len(progress.token_ids) - int(guess._num_pending[slot])
                own = guess.prefixes(request, PrefillOutput(prefix))[0]
                compare_next(guess.lanes, slot, own, progress.token_ids[:held])
            num_compared += 1
    assert num_compared > 10


@torch.inference_mode()
def compare_next(lanes: LaneModel, slot: int, prefix: Prefix, tokens: Sequence[int]) -> None:
    """Compare the states of one more token with those behind a fresh prefill of prompt and `tokens`."""
    more = torch.tensor([*tokens, 7])
    embeds = torch.cat([prefix.embeds, lanes.decoder.get_input_embeddings()(more)])  # type: ignore[operator]
    later = prefix.positions[..., -1].max() + 1 + torch.arange(len(more))
    positions = torch.cat([prefix.positions, later.expand(*prefix.positions.shape[:-1], -1)], dim=-1)
    visual = torch.cat([prefix.visual, torch.zeros(len(more), dtype=torch.bool)])
    whole = Prefix(torch.cat([prefix.token_ids, more]), embeds, positions, visual, prefix.deepstack)
    fresh = LaneModel(lanes.decoder, lanes.head, 1, 1, whole.length)
    filled = fresh.admit(SlotBatch(torch.zeros(1, dtype=torch.long), (0,), (0,)), [[whole]])
    one = torch.zeros(1, 1, dtype=torch.long)
    batch = SlotBatch(torch.tensor([slot]), (slot,), (len(more) + 2,))
    got = lanes.forward(batch, one + 7, one, torch.ones(1, 1, 1, dtype=torch.bool))
    torch.testing.assert_close(got[0, :, 0], filled.last[0], **CLOSE)


@torch.inference_mode()
def check_ragged_prefill(family: str) -> None:
    """The states of prompts that are padded to a common length are those of each prompt alone."""
    target = toys.target(family)
    prefixes = [target.encode(request.prompt, ()) for request in long_prompts(family, 5, Sampling())]
    numbers = torch.arange(len(prefixes))
    together = LaneModel(target.decoder, target.head, len(prefixes), 1, 160)
    together.admit(SlotBatch(numbers, tuple(range(len(prefixes))), (0,) * len(prefixes)), [[p] for p in prefixes])
    for row, prefix in enumerate(prefixes):
        alone = LaneModel(target.decoder, target.head, 1, 1, 160)
        alone.admit(SlotBatch(numbers[:1], (0,), (0,)), [[prefix]])
        assert together.cache.states is not None
        assert alone.cache.states is not None
        pairs = zip(together.cache.states.tensors(), alone.cache.states.tensors(), strict=True)
        num_compared = 0
        for mine, theirs in pairs:
            torch.testing.assert_close(mine[row], theirs[0], **CLOSE)
            num_compared += int(theirs[0].any())
        assert num_compared >= len(together.cache.states.layers), "the states are zero"


@torch.inference_mode()
def check_emptied_slot(family: str) -> None:
    """A slot that is emptied begins as after no token."""
    target = toys.target(family)
    prefix = target.encode(long_prompts(family, 1, Sampling())[0].prompt, ())
    used, fresh = (LaneModel(target.decoder, target.head, 1, 1, 200) for _ in range(2))
    slot, tokens = SlotBatch(torch.zeros(1, dtype=torch.long), (0,), (1,)), torch.tensor([[7, 9, 11]])
    depth = torch.arange(3)[None]
    used.admit(slot, [[prefix]])
    used.forward(slot, tokens, depth, depth[:, :, None] >= depth[:, None])
    used.commit(slot, depth[:, :0], torch.tensor([2]))
    results = []
    for lanes in (used, fresh):
        lanes.empty(slot)
        results.append(lanes.forward(slot, tokens, depth, depth[:, :, None] >= depth[:, None]))
    torch.testing.assert_close(results[0], results[1], **CLOSE)
