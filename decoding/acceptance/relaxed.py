"""Base class of relaxed rules: accepts a draft if it is the target's token or if the rule pardons the mismatch.

The token after the path is always the target's own. EOS and other special tokens are never relaxed: a draft can neither
end the output early nor continue it after the target's EOS.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.acceptance.walk import Branches, target_choice, walk_accepted, wanted_tokens
from decoding.contracts import Acceptance, EngineSpec, VerificationOutput
from decoding.tree import AcceptanceResult


@dataclass(frozen=True)
class Mismatches:
    """Inputs of rules: the target's token (b, N) at the position of each draft, and whether the draft equals it."""

    wanted: Tensor
    match: Tensor
    branches: Branches


class RelaxedRule(Acceptance):
    """Base class of lossy rules; subclasses implement `pardon`."""

    lossless = False

    def open(self, spec: EngineSpec) -> None:
        self._is_special = special_tokens(spec)

    @abstractmethod
    def pardon(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        """Return a mask of acceptable mismatches: (b, 1, N), or (b, L, N) if it depends on the branch."""

    def merit(self, verification: VerificationOutput) -> Tensor | None:
        """Return scores (b, N), whose sum decides between equally long paths; None counts matches with the target."""
        return None

    def accepts(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        """Return a mask of acceptable drafts, in the shape that `pardon` returns."""
        strict = self._is_special[verification.tree.tokens] | self._is_special[mismatches.wanted]
        if verification.has_grammar:
            strict |= ~legal_drafts(verification)
        return mismatches.match[:, None] | (self.pardon(verification, mismatches) & ~strict[:, None])

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        tree = verification.tree
        choice = target_choice(verification)
        wanted = wanted_tokens(tree, choice)
        mismatches = Mismatches(wanted, tree.tokens == wanted, Branches.of(tree))
        return walk_accepted(
            tree, mismatches.branches, choice, self.accepts(verification, mismatches), self.merit(verification)
        )


def legal_drafts(verification: VerificationOutput) -> Tensor:
    """Return a mask (b, N) of the drafts that the request's grammar allows: others have logits of −inf."""
    parents = verification.tree.parents.clamp_min(0)
    rows = torch.arange(parents.shape[0], device=parents.device)[:, None]
    return verification.target_logits[rows, parents, verification.tree.tokens] > -torch.inf


def special_tokens(spec: EngineSpec) -> Tensor:
    """Return a mask (V,) of the tokens that no rule may relax."""
    special = sorted(token for token in spec.special_ids | spec.eos_ids if 0 <= token < spec.vocab_size)
    marks = torch.zeros(spec.vocab_size, dtype=torch.bool, device=spec.device)
    marks[torch.tensor(special, dtype=torch.long, device=spec.device)] = True
    return marks
