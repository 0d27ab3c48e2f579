"""Runs steps on tensors without values, so that reading a value on the host raises.

Under FakeTensorMode any `.item()`, `.tolist()`, `if tensor:` or data-dependent shape raises; a step that runs there can
be captured and compiled. Copies from the host, which also synchronise, are refused after the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from decoding.conformance import toys
from decoding.contracts import EngineSpec, Method, PrefillOutput
from decoding.scheduling.slots import RequestState, SlotTable
from decoding.step import StepResult, run_step
from decoding.types import Request, Sampling
from models.inputs.prefix import Prefix
from models.target import Target

COPIES = {torch.tensor, torch.as_tensor, torch.from_numpy}
PRINTS = {torch.Tensor.__repr__, torch.Tensor.__format__}
NUM_SLOTS, MAX_CONTEXT = 3, 64
PROMPT_TOKENS = (6, 9, 4)
SAMPLING = Sampling(max_new_tokens=20, temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=1.2)
PROCESSED = Sampling(
    max_new_tokens=20, temperature=0.8, min_p=0.1, repetition_penalty=1.2, no_repeat_ngram_size=3,
    bad_words_ids=((5,), (6, 7)), sequence_bias=(((8,), 1.0), ((9, 10, 11), -1.0)), suppress_tokens=(12,),
    begin_suppress_tokens=(13,), min_new_tokens=19, forced_eos_token_id=(2,),
)  # fmt: skip


class HostRead(RuntimeError):
    """Raised for a copy from the host in a step."""


class NothingFromTheHost(TorchFunctionMode):
    """Refuses tensors built from host numbers, whose copy synchronises."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A scalar is a kernel argument.
        is_kept = bool(args) and isinstance(args[0], (int, float))
        if func in COPIES and not is_kept:
            raise HostRead(f"{func.__name__}{args} is copied from the host")
        if func in PRINTS:
            raise HostRead("a tensor is printed or formatted")
        # But not in an assignment, which makes a tensor of it on the host.
        if func is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            raise HostRead(f"{args[2]} is copied from the host; use fill_ or index_put_")
        return func(*args, **(kwargs or {}))


def fake_prefix(target: Target, length: int) -> Prefix:
    """Return a prompt of `length` tokens, of which the first two are visual."""
    ids = torch.arange(4, 4 + length)
    embeds = target.decoder.get_input_embeddings()(ids)  # type: ignore[operator]
    return Prefix(ids, embeds, torch.arange(length), torch.arange(length) < 2)


def run_steps(
    method: Method,
    target: Target,
    prompts_of: Callable[[Prefix], list[Prefix]] = lambda _: [],
    admitted: Callable[[list[PrefillOutput]], None] = lambda _: None,
    steps: AbstractContextManager[Any] | None = None,
) -> StepResult:
    """Run steps with and without drafts under FakeTensorMode: that of the caller, or `steps` for the steps alone.

    `prompts_of` returns the drafter's prompts of a sample, `admitted` is called with the prefill outputs before the
    first step. The last step's result is returned; errors of torch and `HostRead` are raised.
    """
    tree = method.tree
    capacity = MAX_CONTEXT + tree.num_scratch(method.drafter.shares_cache)
    lanes = target.lanes(NUM_SLOTS, 1, capacity, method.drafter.feature_layers)
    table = SlotTable(NUM_SLOTS, target.vocab_size, target.device)
    spec = EngineSpec(
        NUM_SLOTS, MAX_CONTEXT, target.vocab_size, target.hidden_size, target.device, target.eos_ids,
        target.special_ids, tree.max_frontier_nodes, tree.max_grown_nodes, tree.max_levels,
        target.decoder.get_input_embeddings().weight,  # type: ignore[operator]
        max_missed_tokens=MAX_CONTEXT, lanes=lanes, constraints=table.constraints,
    )  # fmt: skip
    for part in (method.drafter, tree, method.acceptance):
        part.open(spec)
    sampling = (SAMPLING, SAMPLING, PROCESSED)
    progress = [
        RequestState(Request(f"s{number}", "", (), own_sampling), length, 2, tree.max_levels, token_ids=[5])
        for number, (length, own_sampling) in enumerate(zip(PROMPT_TOKENS, sampling, strict=True))
    ]
    prefixes = [fake_prefix(target, length) for length in PROMPT_TOKENS]
    numbers = list(range(NUM_SLOTS))
    table.occupy(numbers, progress, prefixes)
    slots = table.batch(numbers)
    prefill = lanes.admit(slots, [[prefix] for prefix in prefixes], probe_attention=True)
    prefill_outputs = [
        PrefillOutput(p, prefill.hidden_of(i), None, prefill.features_of(i)) for i, p in enumerate(prefixes)
    ]
    method.drafter.admit(slots, table.root[slots.index], prefill_outputs)
    method.drafter.prefill(slots, [prompts_of(prefix) for prefix in prefixes])
    tree.reset(slots)
    admitted(prefill_outputs)
    rows = table.sampling(slots)
    levels = tree.max_levels if method.drafter.name != "none" else 0
    with steps or nullcontext():
        # Off in between: the host knows the number of missed tokens.
        for number, num_levels in enumerate((levels, 0, 0, 0, levels, levels)):
            # Copies of the first step are cached.
            with NothingFromTheHost() if number else nullcontext():
                result = run_step(method, lanes, table, slots, rows, num_levels)
    return result


def check_host_reads(make: Callable[[Target], Method], prompts_of: Callable[[Prefix], list[Prefix]]) -> None:
    """Run steps of a method without values on the toy target; raise the error of the first read or copy.
    `prompts_of` is as in `run_steps`."""
    target = toys.target()
    with torch.inference_mode():
        # Samples are admitted with values; in steps, tensors lose theirs when they are used.
        run_steps(make(target), target, prompts_of, steps=FakeTensorMode(allow_non_fake_inputs=True))
