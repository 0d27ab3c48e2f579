"""The stable codes under which a request can fail inside the engine; none of them stops another request.

prompt_refused      the processor or chat template refuses the sample (image count, empty prompt, …)
context_too_long    prompt, images and max_new_tokens do not fit the slot
non_finite_logits   the target gave NaN for a token that was taken
"""

from __future__ import annotations

from decoding.types import RequestError

PROMPT_REFUSED = "prompt_refused"
CONTEXT_TOO_LONG = "context_too_long"
NON_FINITE_LOGITS = "non_finite_logits"
CODES = (PROMPT_REFUSED, CONTEXT_TOO_LONG, NON_FINITE_LOGITS)


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
