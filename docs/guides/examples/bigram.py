"""A drafter that proposes, after each token, the token that followed it last in the same row."""

import torch
from draftfleet.decoding.contracts import Drafter
from draftfleet.decoding.tree import NO_TOKEN


class BigramDrafter(Drafter):
    name = "bigram"

    def __init__(self, reads_prompt: bool = True) -> None:
        self.reads_prompt = reads_prompt

    def open(self, spec):
        # One row per slot. The last column takes what a step computes beyond the end of a row.
        self.vocab_size = spec.vocab_size
        shape = (spec.num_slots, spec.vocab_size + 1)
        self.follower = torch.full(shape, NO_TOKEN, dtype=torch.long, device=spec.device)

    def admit(self, slots, first, prefill_outputs):
        for slot, token, prefill_output in zip(slots.ids, first, prefill_outputs, strict=True):
            self.follower[slot] = NO_TOKEN
            if self.reads_prompt:
                text = torch.cat([prefill_output.prefix.token_ids[~prefill_output.prefix.visual], token[None]])
                self.follower[slot, text[:-1]] = text[1:]

    def draft(self, slots, frontier):
        tokens = self.follower[slots.index[:, None], frontier.tokens]
        logits = torch.full((*tokens.shape, self.vocab_size), -torch.inf, device=tokens.device)
        scores = torch.where(tokens >= 0, 0.0, -torch.inf)
        return logits.scatter_(2, tokens.clamp_min(0)[:, :, None], scores[:, :, None])

    def commit(self, verification, result):
        tokens = result.produced(verification.tree)
        before = torch.cat([verification.tree.tokens[:, :1], tokens[:, :-1]], dim=1)
        is_new = torch.arange(tokens.shape[1], device=tokens.device) < result.n[:, None]
        before = torch.where(is_new, before, self.vocab_size)
        self.follower[verification.slots.index[:, None], before] = tokens

    def replay_key(self, slots, num_levels):
        return ()  # the kernels of a step depend on no state of the host
