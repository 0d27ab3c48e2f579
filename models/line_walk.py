"""A walk down a line of drafts along the target's best tokens, on a CPU: `line_walk.cpp`, compiled when first needed.

In one pass what choosing, comparing, counting and taking logarithms are dozens of small operations for, each of them as
slow as it is cold after a forward; and nodes behind the first wrong draft are not looked at. Knows tensors only.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from models.attention_loops import is_at_work

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "line_walk.cpp"))
_Sizes = ctypes.c_int64 * 7


def can_walk(logits: Tensor) -> bool:
    """Whether `WALK` takes these logits: dense fp32 on a CPU on which such loops are at work already."""
    fits = logits.device.type == "cpu" and logits.dtype == torch.float32 and is_at_work()
    return fits and logits.is_contiguous() and _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    from torch._inductor.codecache import CppCodeCache

    try:
        library: ctypes.CDLL = CppCodeCache.load("\n".join(source.read_text() for source in SOURCES))
    except Exception as error:  # compilers and what starts them fail in ways of their own
        reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
        logger.warning("drafts are compared by torch's own operations, which is slower: %s", reason)
        return None
    library.walk_line.argtypes = [ctypes.c_void_p] * 9 + [ctypes.c_int]
    library.walk_line.restype = None
    return library


def walk_line(logits: Tensor, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Follow the best token of each node's `logits` (b, N, V) as long as the next node's token is that and it is valid.

    `tokens` and `valid` (b, N) are the line's, its root first. Returns the path (b, N), how many nodes of it were
    walked (b,), the token after the last of them (b,), and what was said after each node (b, N) with the natural
    logarithm of its probability (b, N); zeros behind the walk's end. Best is what `argmax` takes.
    """
    b, num_nodes, vocabulary = logits.shape
    path, said = torch.empty(b, num_nodes, dtype=torch.long), torch.empty(b, num_nodes, dtype=torch.long)
    counts, own = torch.empty(b, dtype=torch.long), torch.empty(b, dtype=torch.long)
    logprobs = torch.empty(b, num_nodes)
    assert (tokens.dtype, valid.dtype) == (torch.long, torch.bool), (tokens.dtype, valid.dtype)
    assert tokens.shape == valid.shape == (b, num_nodes), (tokens.shape, valid.shape)
    library = _library()
    assert library is not None
    library.walk_line(
        logits.data_ptr(),
        tokens.data_ptr(),
        valid.data_ptr(),
        _Sizes(b, num_nodes, vocabulary, *tokens.stride(), *valid.stride()),
        path.data_ptr(),
        counts.data_ptr(),
        own.data_ptr(),
        said.data_ptr(),
        logprobs.data_ptr(),
        torch.get_num_threads(),
    )
    return path, counts, own, said, logprobs


def _walked(logits: Tensor, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = tokens.new_empty(tokens.shape)
    return like, tokens.new_empty(tokens.shape[0]), tokens.new_empty(tokens.shape[0]), like.clone(), like.float()


_definition = torch.library.Library("draftfleet", "FRAGMENT")  # type: ignore[no-untyped-call]
_definition.define(  # type: ignore[no-untyped-call]
    "walk_line(Tensor logits, Tensor tokens, Tensor valid) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_definition.impl("walk_line", walk_line, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("draftfleet::walk_line", _walked, lib=_definition)
WALK = torch.ops.draftfleet.walk_line
