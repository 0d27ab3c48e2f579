"""The target's token after every node, with which all rules compare drafts."""

from __future__ import annotations

from torch import Tensor

from decoding.contracts import Judgement
from decoding.noise import Stream
from decoding.sampling import perturb


def target_choice(judgement: Judgement) -> Tensor:
    """The target's token (b, N) after each node: the argmax, or on sampled rows its shared-noise draw."""
    tree, noise = judgement.tree, None
    if judgement.rows.any_sampled:
        draws = judgement.noise.gumbel(Stream.TOKEN)
        noise = draws.gather(1, tree.depth[:, :, None].expand(-1, -1, draws.shape[-1]))
    return perturb(judgement.warped, noise, judgement.rows).argmax(dim=-1)
