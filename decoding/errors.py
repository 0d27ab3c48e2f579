"""Defines the stable error codes of requests that fail in the engine.

prompt_refused      the processor or chat template refuses the sample (image count, empty prompt, …)
context_too_long    prompt, images and max_new_tokens do not fit the slot
non_finite_logits   the target computed NaN for an output token
row_timeout         the sample exceeded the time limit of its slot
grammar_failed      the output could not follow the grammar of the request
out_of_memory       the sample does not fit into device memory, even without other samples
"""

from __future__ import annotations

from decoding.types import Completion, RequestError

PROMPT_REFUSED = "prompt_refused"
CONTEXT_TOO_LONG = "context_too_long"
NON_FINITE_LOGITS = "non_finite_logits"
ROW_TIMEOUT = "row_timeout"
GRAMMAR_FAILED = "grammar_failed"
OUT_OF_MEMORY = "out_of_memory"
CODES = (PROMPT_REFUSED, CONTEXT_TOO_LONG, NON_FINITE_LOGITS, ROW_TIMEOUT, GRAMMAR_FAILED, OUT_OF_MEMORY)


class DrafterError(RuntimeError):
    """Raised if only the drafter failed; samples in flight can be decoded without it."""


def failed(sample_id: str, code: str, message: str) -> Completion:
    """Return the completion of a sample that was not decoded, with its error."""
    return Completion(sample_id=sample_id, finish_reason="error", error=RequestError(code, message))
