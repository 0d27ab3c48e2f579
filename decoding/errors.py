"""Defines the stable error codes of requests that fail in the engine.

prompt_refused      the processor or chat template refuses the sample (image count, empty prompt, …)
context_too_long    prompt, images and max_new_tokens do not fit the slot
non_finite_logits   the target computed NaN for an output token
row_timeout         the sample exceeded the time limit of its slot
out_of_memory       the sample does not fit into device memory, even without other samples
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
    """Raised if only the drafter failed; samples in flight can be decoded without it."""


def context_too_long(model: str, num_prompt_tokens: int, max_new_tokens: int, max_context_tokens: int) -> RequestError:
    """Return the error of a sample that needs more KV positions than a slot has; `model` is "target" or "drafter"."""
    return RequestError(
        CONTEXT_TOO_LONG,
        f"the {model}'s prompt has {num_prompt_tokens} tokens (images included) and max_new_tokens is "
        f"{max_new_tokens}: together more than pool.max_context_tokens ({max_context_tokens})",
    )


def non_finite_logits() -> RequestError:
    """Return the error of a sample with a non-finite log probability of an output token."""
    return RequestError(NON_FINITE_LOGITS, "the target's logits are not finite for this sample; try another dtype")


def row_timeout(max_row_s: float, num_tokens: int) -> RequestError:
    """Return the error of a sample that ran too long. Its `num_tokens` tokens are dropped, because their number depends
    on the machine's speed."""
    return RequestError(
        ROW_TIMEOUT, f"{num_tokens} tokens after more than pool.max_row_s ({max_row_s:g} s); none of them are kept"
    )


def out_of_memory(reason: str) -> RequestError:
    """Return the error of a sample that does not fit into memory even alone; `reason` is the allocator's message."""
    return RequestError(OUT_OF_MEMORY, f"the device's memory does not hold this sample even alone: {reason}")
