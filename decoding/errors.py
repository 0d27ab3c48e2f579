"""The stable codes under which a request can fail inside the engine; none of them stops another request.

prompt_refused      the processor or chat template refuses the sample (image count, empty prompt, …)
context_too_long    prompt, images and max_new_tokens do not fit the slot
non_finite_logits   the target gave NaN for a token that was taken
row_timeout         the sample was in its slot for longer than it may
out_of_memory       the sample does not fit into the device's memory, with nothing beside it
"""

from __future__ import annotations

from decoding.types import RequestError

PROMPT_REFUSED = "prompt_refused"
CONTEXT_TOO_LONG = "context_too_long"
NON_FINITE_LOGITS = "non_finite_logits"
ROW_TIMEOUT = "row_timeout"
OUT_OF_MEMORY = "out_of_memory"
CODES = (PROMPT_REFUSED, CONTEXT_TOO_LONG, NON_FINITE_LOGITS, ROW_TIMEOUT, OUT_OF_MEMORY)


class DrafterError(RuntimeError):
    """The drafter failed where the target did not: the samples in flight can be decoded without it."""


def context_too_long(who: str, num_prompt_tokens: int, max_new_tokens: int, max_context_tokens: int) -> RequestError:
    """The sample needs more columns than a slot has; `who` is the target or the drafter."""
    return RequestError(
        CONTEXT_TOO_LONG,
        f"the {who}'s prompt has {num_prompt_tokens} tokens (images included) and max_new_tokens is {max_new_tokens}: "
        f"together more than pool.max_context_tokens ({max_context_tokens})",
    )


def non_finite_logits() -> RequestError:
    """A taken token has no probability: the model is broken for this input, or its type overflows."""
    return RequestError(NON_FINITE_LOGITS, "the target's logits are not finite for this sample; try another dtype")


def row_timeout(max_row_s: float, num_tokens: int) -> RequestError:
    """The sample has had its time; how far it got depends on the machine, so none of its `num_tokens` are kept."""
    return RequestError(
        ROW_TIMEOUT, f"{num_tokens} tokens after more than pool.max_row_s ({max_row_s:g} s); none of them are kept"
    )


def out_of_memory(reason: str) -> RequestError:
    """The device's memory does not hold this sample even alone; `reason` is the allocator's."""
    return RequestError(OUT_OF_MEMORY, f"the device's memory does not hold this sample even alone: {reason}")
