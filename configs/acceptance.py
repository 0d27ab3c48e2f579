"""Which drafts the target takes: the lossless rules, and the relaxed ones with every knob they have."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from configs.section import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class ExactAcceptance(Section):
    """Lossless: greedy match, or the target's own shared-noise draw."""

    kind: Literal["exact"] = "exact"
    lossless: ClassVar[bool] = True


class RejectionAcceptance(Section):
    """Lossless in distribution: rejection sampling with residuals (Leviathan et al. 2023, Algorithm 1)."""

    kind: Literal["rejection"] = "rejection"
    lossless: ClassVar[bool] = True


class LVSpecAcceptance(Section):
    """Lossy: strict on drafts that speak of what is seen, loose on the others (LVSpec, 2026, Eq. 8 to 11)."""

    kind: Literal["lvspec"] = "lvspec"
    lossless: ClassVar[bool] = False
    loose: Share = 0.7
    """λ: the share of each block, rounded down, whose least visual drafts may differ from the target's choice."""
    top_visual: Annotated[int, Field(ge=1, le=65_536)] = 10
    """N: relevance is the mean cosine with this many nearest visual states of the target's prefill."""
    position_shift: bool = True
    """Also take a draft where the target's own token stands elsewhere in the block."""
    relevance_of: Literal["draft", "before", "embedding"] = "draft"
    """Compared with the images: the state at the draft (the paper), the one before it, or the token's embedding."""


class FlyAcceptance(Section):
    """Lossy: a mismatch passes where the target was unsure and agrees again soon after (FLy, 2025)."""

    kind: Literal["fly"] = "fly"
    lossless: ClassVar[bool] = False
    min_entropy: Annotated[float, Field(ge=0.0, le=100.0)] = 0.3
    """Nats over the `top` probabilities, not renormalised; nothing passes above their maximum (1.11 for three)."""
    window: Annotated[int, Field(ge=0, le=63)] = 5
    """Matches that must follow the mismatch; 0 drops the window (FLy⊖)."""
    top: Annotated[int, Field(ge=1, le=1024)] = 3
    """How many of the largest probabilities the entropy sums over."""
    block_end: Literal["margin", "fit"] = "margin"
    """Strict at a block's end: `fit`, the drafts whose window does not fit; `margin`, one more (the public code)."""


class RandomAcceptance(Section):
    """Lossy: any mismatch passes with a fixed probability; the control for informed rules."""

    kind: Literal["random"] = "random"
    lossless: ClassVar[bool] = False
    probability: Share = 0.5
    """Chance of each mismatch, drawn from the sample's own noise."""


class TypicalAcceptance(Section):
    """Lossy: a draft passes with p > min(epsilon, alpha · exp(−entropy)) (Medusa, 2024, section 2.3.1)."""

    kind: Literal["typical"] = "typical"
    lossless: ClassVar[bool] = False
    epsilon: Annotated[float, Field(gt=0.0, le=1.0)] = 0.09
    """The bound where the target is sure."""
    alpha: Annotated[float, Field(gt=0.0, le=1e9)] = 0.3
    """The bound's factor where it is not; nothing passes with epsilon 1 and alpha at the vocabulary's size."""
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 0.7
    """Softens the target's distribution on greedy rows; sampled rows are judged by what they sample from."""


class LanternAcceptance(Section):
    """Lossy: a code of an image passes for others that look like it (LANTERN, 2024; LANTERN++, 2025)."""

    kind: Literal["lantern"] = "lantern"
    lossless: ClassVar[bool] = False
    k: Annotated[int, Field(ge=1, le=1000)] = 1000
    """Codes of a neighbourhood, the nearest ones."""
    k_counts_draft: bool = True
    """Whether the draft is one of the k (the papers), or stands beside them (the public code)."""
    delta: Annotated[float, Field(ge=0.0, le=1e6)] = 0.1
    """δ, the bound of the divergence; for `multiplicative` λ: the gathered probability is at most λ times its own."""
    divergence: Literal["tvd", "jsd", "multiplicative"] = "tvd"
    """How far the target's distribution may move: total variation, Jensen-Shannon (nats), or LANTERN++'s bound."""
    draw: Literal["coupled", "paper", "code"] = "coupled"
    """Relaxes the target's shared-noise draw, or draws residuals, as the paper has them or as the public code."""
    metric: Literal["l2", "cosine", "random"] = "l2"
    """What near means; `random` draws neighbours, as a control."""
    codebook: Literal["raw", "normalised"] = "raw"
    """The codes as they are stored (the public code), or their directions, which is all that a decoder sees."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the metric `random`."""

    @model_validator(mode="after")
    def _bound(self) -> LanternAcceptance:
        if self.divergence == "multiplicative" and self.delta < 1.0:
            raise ValueError(
                f"delta {self.delta} is λ where divergence is multiplicative, and must be at least 1: a draft's own "
                "probability is gathered too"
            )
        if self.divergence != "multiplicative" and self.delta > 1.0:
            raise ValueError(
                f"delta {self.delta}: {self.divergence} is never above 1; where the public code is given more it means "
                "LANTERN++'s λ, which is divergence: multiplicative"
            )
        if self.codebook == "normalised" and self.metric != "l2":
            reason = "compares directions already" if self.metric == "cosine" else "looks at no codes"
            raise ValueError(f"codebook normalised changes nothing for the metric {self.metric}, which {reason}")
        if self.seed and self.metric != "random":
            raise ValueError(f"seed {self.seed} is for the metric random; {self.metric} draws nothing")
        return self


Acceptance = Annotated[
    ExactAcceptance
    | RejectionAcceptance
    | LVSpecAcceptance
    | FlyAcceptance
    | RandomAcceptance
    | TypicalAcceptance
    | LanternAcceptance,
    Field(discriminator="kind"),
]
