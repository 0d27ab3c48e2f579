"""Lossless acceptance: accepts a draft if it is the token that the target generates without drafts.

Greedy rows compare with the argmax, sampled rows with the target's shared-noise sample argmax(log p + g), where g is
keyed by sample and position (drafter-invariant coupling: Daliri, Musco, Suresh 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import torch

from decoding.acceptance.walk import target_choice, walk_choices
from decoding.contracts import Acceptance, EngineSpec, VerificationOutput
from decoding.tree import AcceptanceResult
from models.backends.base import REFERENCE, Backend
from models.backends.select import backend_for


class Exact(Acceptance):
    """Rule that accepts a draft if it equals the target's own token."""

    _backend: Backend = REFERENCE

    def open(self, spec: EngineSpec) -> None:
        self._backend = backend_for(spec.device)

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        tree = verification.tree
        # Without sampling, penalties and filters, the target's token is the argmax of the target logits.
        if tree.is_chain and verification.processed_logits is verification.target_logits:
            choice, path, n, last = self._backend.verify_chain(verification.target_logits, tree.tokens, tree.valid)
            verification.choices.append(choice)
            return AcceptanceResult(path, n, last, torch.zeros_like(path, dtype=torch.bool))
        return walk_choices(tree, target_choice(verification))
