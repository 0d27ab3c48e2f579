"""Where a line of drafts ends, and a walk down it along the target's best tokens, on a CPU: `verify_chain.cpp`,
compiled when first needed.

In one pass what choosing, comparing, counting and taking logarithms are dozens of small operations for, each of them as
slow as it is cold after a forward; and nodes behind the first wrong draft are not looked at. Knows tensors only.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from models.backends.cpu import attention
from models.backends.cpu.build import Loops, beside

_Sizes = ctypes.c_int64 * 7
LOOPS = Loops(
    beside("vectors.h", "verify_chain.cpp"),
    {
        "walk_line": [*[ctypes.c_void_p] * 9, ctypes.c_int],
        "cut_line": [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3],
    },
    "drafts are compared by torch's own operations, which is slower",
)


def can_walk(logits: Tensor) -> bool:
    """Whether `WALK` or `CUT` takes these numbers: dense fp32 on a CPU on which such loops are at work already."""
    fits = logits.device.type == "cpu" and logits.dtype == torch.float32 and attention.LOOPS.is_at_work
    return fits and logits.is_contiguous() and LOOPS.library() is not None


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
    library = LOOPS.library()
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


def cut_line(best: Tensor, max_depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where lines of drafts end: before the first whose score in `best` (b, N) is no finite number, or that is deeper
    than `max_depth` (b,), the root's depth being 0.

    Returns the nodes before that (b, N), the root among them in any case, how many of them are drafts (b,), and the
    rows with a score that is NaN or infinitely good (b,).
    """
    b, num_nodes = best.shape
    valid, has_failed = torch.empty(b, num_nodes, dtype=torch.bool), torch.empty(b, dtype=torch.bool)
    num_drafted = torch.empty(b, dtype=torch.long)
    assert (max_depth.dtype, max_depth.shape) == (torch.long, (b,)), (max_depth.dtype, max_depth.shape)
    library = LOOPS.library()
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
