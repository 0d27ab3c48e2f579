"""Ends and greedy verification of chains on a CPU: `verify_chain.cpp`, compiled at first use.

One pass replaces dozens of small operations (argmax, comparison, counting, log-softmax). Nodes after the first rejected
draft are not read.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from models.backends.cpu import attention
from models.backends.cpu.build import Library, beside

_Sizes = ctypes.c_int64 * 7
LIBRARY = Library(
    beside("vectors.h", "verify_chain.cpp"),
    {
        "walk_line": [*[ctypes.c_void_p] * 9, ctypes.c_int],
        "cut_line": [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3],
    },
    "chains are verified by torch's operations, which is slower",
)


def can_walk(logits: Tensor) -> bool:
    """Whether `WALK` or `CUT` takes these scores: contiguous fp32, and the attention library is already built."""
    fits = logits.device.type == "cpu" and logits.dtype == torch.float32 and attention.LIBRARY.is_built
    return fits and logits.is_contiguous() and LIBRARY.library() is not None


def walk_line(logits: Tensor, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `models.backends.base.Backend.verify_chain`; zeros after the end of the path."""
    b, num_nodes, vocabulary = logits.shape
    path, target_tokens = torch.empty(b, num_nodes, dtype=torch.long), torch.empty(b, num_nodes, dtype=torch.long)
    counts, own = torch.empty(b, dtype=torch.long), torch.empty(b, dtype=torch.long)
    logprobs = torch.empty(b, num_nodes)
    assert (tokens.dtype, valid.dtype) == (torch.long, torch.bool), (tokens.dtype, valid.dtype)
    assert tokens.shape == valid.shape == (b, num_nodes), (tokens.shape, valid.shape)
    library = LIBRARY.library()
    assert library is not None
    library.walk_line(
        logits.data_ptr(),
        tokens.data_ptr(),
        valid.data_ptr(),
        _Sizes(b, num_nodes, vocabulary, *tokens.stride(), *valid.stride()),
        path.data_ptr(),
        counts.data_ptr(),
        own.data_ptr(),
        target_tokens.data_ptr(),
        logprobs.data_ptr(),
        torch.get_num_threads(),
    )
    return path, counts, own, target_tokens, logprobs


def cut_line(best: Tensor, max_depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `models.backends.base.Backend.cut_chain`."""
    b, num_nodes = best.shape
    valid, has_failed = torch.empty(b, num_nodes, dtype=torch.bool), torch.empty(b, dtype=torch.bool)
    num_drafted = torch.empty(b, dtype=torch.long)
    assert (max_depth.dtype, max_depth.shape) == (torch.long, (b,)), (max_depth.dtype, max_depth.shape)
    library = LIBRARY.library()
    assert library is not None
    numbers = (b, num_nodes, max_depth.stride(0))
    outputs = (valid.data_ptr(), num_drafted.data_ptr(), has_failed.data_ptr())
    library.cut_line(best.data_ptr(), max_depth.data_ptr(), *numbers, *outputs)
    return valid, num_drafted, has_failed


def _cut(best: Tensor, max_depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    valid = best.new_empty(best.shape, dtype=torch.bool)
    return valid, max_depth.new_empty(best.shape[0]), valid.new_empty(best.shape[0])


def _walked(logits: Tensor, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = tokens.new_empty(tokens.shape)
    return like, tokens.new_empty(tokens.shape[0]), tokens.new_empty(tokens.shape[0]), like.clone(), like.float()


_definition = torch.library.Library("draftfleet", "FRAGMENT")  # type: ignore[no-untyped-call]
_definition.define(  # type: ignore[no-untyped-call]
    "walk_line(Tensor logits, Tensor tokens, Tensor valid) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_definition.define("cut_line(Tensor best, Tensor max_depth) -> (Tensor, Tensor, Tensor)")  # type: ignore[no-untyped-call]
_definition.impl("walk_line", walk_line, "CPU")  # type: ignore[no-untyped-call]
_definition.impl("cut_line", cut_line, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("draftfleet::walk_line", _walked, lib=_definition)
torch.library.register_fake("draftfleet::cut_line", _cut, lib=_definition)
CUT = torch.ops.draftfleet.cut_line
WALK = torch.ops.draftfleet.walk_line
