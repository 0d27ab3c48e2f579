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

    def admit(self, slots, first, probes):
        for slot, token, probe in zip(slots.ids, first, probes, strict=True):
            self.follower[slot] = NO_TOKEN
            if self.reads_prompt:
                text = torch.cat([probe.prefix.token_ids[~probe.prefix.visual], token[None]])
                self.follower[slot, text[:-1]] = text[1:]

    def draft(self, slots, frontier):
        tokens = self.follower[slots.index[:, None], frontier.tokens]
        logits = torch.full((*tokens.shape, self.vocab_size), -torch.inf, device=tokens.device)
        scores = torch.where(tokens >= 0, 0.0, -torch.inf)
        return logits.scatter_(2, tokens.clamp_min(0)[:, :, None], scores[:, :, None])

    def commit(self, judgement, verdict):
        tokens = verdict.produced(judgement.tree)
        before = torch.cat([judgement.tree.tokens[:, :1], tokens[:, :-1]], dim=1)
        is_new = torch.arange(tokens.shape[1], device=tokens.device) < verdict.n[:, None]
        before = torch.where(is_new, before, self.vocab_size)
        self.follower[judgement.slots.index[:, None], before] = tokens

    def replay_key(self, slots, num_levels):
        return ()  # the kernels of a step depend on no state of the host
