"""Sum losses over positions in chunks, so that logits of few positions exist at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_LOGITS = 1 << 25
"""Maximum number of elements of one (positions, vocabulary) tensor of a chunk: 128 MiB in fp32."""
Terms = Callable[..., Tensor]
"""Maps chunks (n, …) of the inputs to the sums (k,) of k loss terms over these n positions."""


def sum_in_chunks(
    terms: Terms, inputs: Sequence[Tensor], others: Sequence[Tensor], weights: Sequence[Tensor], vocab_size: int
) -> Tensor:
    """Return the sums (k,) of `terms(*inputs, *others)` over all positions, with gradients of `inputs` and `weights`.

    `inputs` (N, …) have gradients, `others` (N, …) none. Gradients are computed chunk by chunk in the forward, so that
    no logits are kept or computed again; of `weights` one gradient per term is kept until the backward. `vocab_size`
    is the width of the widest logits.
    """
    result: Tensor = _SumInChunks.apply(  # type: ignore[no-untyped-call]
        terms, max(1, MAX_LOGITS // vocab_size), torch.is_grad_enabled(), len(inputs), *inputs, *weights, others
    )
    return result


class _SumInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Terms, size: int, learns: bool, num_inputs: int, *given: Any) -> Tensor:
        *tensors, others = given
        inputs = tensors[:num_inputs]
        # Gradients by term: of whole inputs by their index, and of weights by their index after them.
        weights = {index: value for index, value in enumerate(tensors) if index >= num_inputs and value.requires_grad}
        total: Tensor | None = None
        gradients_by_term: list[dict[int, Tensor]] = []
        for start in range(0, max(1, (*inputs, *others)[0].shape[0]), size):
            with torch.set_grad_enabled(learns):
                parts = [each[start : start + size].detach().requires_grad_(learns) for each in inputs]
                sums = terms(*parts, *(each[start : start + size] for each in others))
                by_term = sums.unbind()
            total = sums.detach() if total is None else total + sums.detach()
            if not learns:
                continue
            gradients_by_term = gradients_by_term or [{} for _ in by_term]
            wanted = dict(enumerate(parts)) | weights
            for number, gradients in enumerate(gradients_by_term):
                is_last = number + 1 == len(gradients_by_term)
                some = torch.autograd.grad(
                    by_term[number], list(wanted.values()), retain_graph=not is_last, allow_unused=True
                )
                for index, gradient in zip(wanted, some, strict=True):
                    if gradient is None:
                        continue
                    if index < num_inputs:
                        accumulated = gradients.setdefault(index, torch.zeros_like(inputs[index]))
                        accumulated[start : start + size] = gradient
                    elif index in gradients:
                        gradients[index] += gradient
                    else:
                        gradients[index] = gradient.clone()
        assert total is not None
        ctx.gradients, ctx.num_tensors = gradients_by_term, len(tensors)
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Any:
        gradients: list[Tensor | None] = [None] * ctx.num_tensors
        for scale, term_gradients in zip(outer, ctx.gradients, strict=True):
            for index, gradient in term_gradients.items():
                accumulated = gradients[index]
                gradients[index] = gradient.mul_(scale) if accumulated is None else accumulated.add_(gradient * scale)
        ctx.gradients = []
        return (None, None, None, None, *gradients, None)
