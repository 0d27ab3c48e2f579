"""Records the acceptance of a step's first draft under every k, δ, metric and divergence, without changing verdicts.

The paper's Table 2 and Figure 2: acceptance probability of the first draft, mass of the likeliest codes, and how often
the drafter guesses the likeliest code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decoding.acceptance.neighbourhood import Divergence, Neighbourhood
from decoding.acceptance.walk import target_choice
from decoding.contracts import Acceptance, EngineSpec, PrefillOutput, VerificationOutput
from decoding.noise import Stream
from decoding.tree import AcceptanceResult
from models.kv.lanes import SlotBatch

TOPS = (1, 10)
DRAFTER_TOPS = (1, 3)


@dataclass(frozen=True)
class Setting:
    """A relaxation setting: the `k` nearest neighbours by `metric`, bounded by `delta` under `divergence`."""

    metric: str
    divergence: Divergence
    k: int
    delta: float

    @property
    def name(self) -> str:
        return f"{self.metric}/{self.divergence}/{self.k}/{self.delta}"


class Recorder(Acceptance):
    """The acceptance rule `rule`, with statistics on the children of the root of each tree."""

    def __init__(self, rule: Acceptance, tables: dict[str, Tensor], settings: Iterable[Setting]) -> None:
        self.rule = rule
        self.lossless = rule.lossless
        self.draft_stream = rule.draft_stream
        self.needs_draft_probs = rule.needs_draft_probs
        self.needs_hidden = rule.needs_hidden
        self._around = {
            s: Neighbourhood(tables[s.metric], s.k, s.delta, s.divergence, k_counts_draft=True) for s in settings
        }
        self._num_steps = 0
        self._sums: dict[str, float] = {}

    def open(self, spec: EngineSpec) -> None:
        self.rule.open(spec)
        for neighbourhood in self._around.values():
            neighbourhood.open(spec)

    def admit(self, slots: SlotBatch, prefill_outputs: Sequence[PrefillOutput]) -> None:
        self.rule.admit(slots, prefill_outputs)

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        result = self.rule.accept(verification)
        tree = verification.tree
        children = (tree.parents == 0) & tree.valid
        # No draft follows the last code.
        rows = children.any(dim=1).nonzero()[:, 0]
        if len(rows):
            self._note(verification, children[rows], rows)
        return result

    def _note(self, verification: VerificationOutput, children: Tensor, rows: Tensor) -> None:
        self._num_steps += len(rows)
        tokens, target_logits = verification.tree.tokens[rows], verification.target_logits[rows, 0]
        law = verification.processed_logits[rows, 0].double().softmax(dim=-1)
        for name, mass in (("guided", target_logits.double().softmax(dim=-1)), ("filtered", law)):
            likeliest = mass.topk(max(TOPS), dim=-1).values
            for top in TOPS:
                self._add(f"top{top}_{name}", likeliest[:, :top].sum(dim=-1))
        # How often the target's likeliest code is among the root's first children, in draft order.
        order = children.cumsum(dim=1) * children
        guessed = children & (tokens == target_logits.argmax(dim=-1)[:, None])
        for top in DRAFTER_TOPS:
            self._add(f"guessed_in_top{top}", (guessed & (order <= top)).any(dim=1))
        draft = tokens.gather(1, children.long().argmax(dim=1)[:, None])[:, 0]
        draft_probs = law.gather(1, draft[:, None])[:, 0]
        self._add("strict_probability", draft_probs)
        wanted = None
        if self.draft_stream == Stream.TOKEN:
            wanted = target_choice(verification)[rows, 0]
            self._add("strict_hit", wanted == draft)
        for setting, neighbourhood in self._around.items():
            near = neighbourhood.around(draft)
            near_probs = law.gather(1, near)
            members = neighbourhood.members(draft, draft_probs, near, near_probs)
            self._add(f"probability/{setting.name}", draft_probs + (near_probs * members).sum(dim=-1))
            if wanted is not None:
                replaces_it = (members & (near == wanted[:, None])).any(dim=-1)
                self._add(f"hit/{setting.name}", replaces_it | (wanted == draft))

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())

    def means(self) -> dict[str, Any]:
        """Return the means over the steps with drafts."""
        return {"num_steps": self._num_steps} | {k: v / max(1, self._num_steps) for k, v in self._sums.items()}


def record(rule: Acceptance, tables: dict[str, Tensor], ks: Iterable[int], deltas: Iterable[float]) -> Recorder:
    """Return a recorder of the paper's grid: k × δ by ℓ2 and TVD, and other metrics and divergences at the largest
    k."""
    ks, deltas = sorted(ks), sorted(deltas)
    settings = [Setting("l2", "tvd", k, delta) for k in ks for delta in deltas]
    settings += [Setting(metric, "tvd", ks[-1], delta) for metric in tables if metric != "l2" for delta in deltas]
    settings += [Setting("l2", "jsd", ks[-1], delta) for delta in deltas]
    return Recorder(rule, tables, settings)


def pick(means: dict[str, Any], kind: str, setting: Setting) -> float:
    """Return one statistic of a setting: `kind` is "probability" or "hit"."""
    return float(means[f"{kind}/{setting.name}"])
