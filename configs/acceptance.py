"""Which drafts the target takes: the lossless rules, and the relaxed ones with every knob they have."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

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


Acceptance = Annotated[
    ExactAcceptance | RejectionAcceptance | LVSpecAcceptance | FlyAcceptance | RandomAcceptance | TypicalAcceptance,
    Field(discriminator="kind"),
]
