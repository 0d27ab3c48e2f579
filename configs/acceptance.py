"""Defines the options of acceptance rules, lossless and lossy, and of audits of lossy ones."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from configs.section import BUILT_IN, EXTERNAL, ExternalAcceptanceConfig, Section, kind_tag

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class ExactAcceptanceConfig(Section):
    """Lossless: a draft passes if it equals the target's greedy token, or the target's draw with shared noise."""

    kind: Literal["exact"] = "exact"
    lossless: ClassVar[bool] = True


class RejectionAcceptanceConfig(Section):
    """Lossless in distribution: rejection sampling with residuals (Leviathan et al. 2023, Algorithm 1)."""

    kind: Literal["rejection"] = "rejection"
    lossless: ClassVar[bool] = True


class LVSpecAcceptanceConfig(Section):
    """Lossy: relaxed acceptance of drafts without visual relevance (LVSpec, 2026, Eq. 8 to 11)."""

    kind: Literal["lvspec"] = "lvspec"
    lossless: ClassVar[bool] = False
    loose: Share = 0.7
    """Λ, the share of a draft block that is relaxed: the drafts with the least visual relevance."""
    top_visual: Annotated[int, Field(ge=1, le=65_536)] = 10
    """N, the number of nearest visual states that determine the visual relevance."""
    position_shift: bool = True
    """Also accept a draft if the target's token occurs elsewhere in the block."""
    relevance_of: Literal["draft", "before", "embedding"] = "draft"
    """State that is compared with the images: at the `draft`, at the position `before` it, or the draft's `embedding`.
    """


class FlyAcceptanceConfig(Section):
    """Lossy: a mismatch passes if the target's entropy is high and the following drafts match (FLy, 2025)."""

    kind: Literal["fly"] = "fly"
    lossless: ClassVar[bool] = False
    min_entropy: Annotated[float, Field(ge=0.0, le=100.0)] = 0.3
    """Minimum entropy of the target at a mismatch that may pass, in nats over the `top` probabilities."""
    window: Annotated[int, Field(ge=0, le=63)] = 5
    """Number of matches that must follow a mismatch; 0 requires none."""
    top: Annotated[int, Field(ge=1, le=1024)] = 3
    """Number of largest probabilities over which the entropy is summed."""
    block_end: Literal["margin", "fit"] = "margin"
    """Strict positions at a block's end: those whose `window` does not `fit`, or one more (`margin`, public code)."""


class RandomAcceptanceConfig(Section):
    """Lossy baseline: every mismatch passes with a fixed probability."""

    kind: Literal["random"] = "random"
    lossless: ClassVar[bool] = False
    probability: Share = 0.5
    """Probability that a mismatch passes."""


class TypicalAcceptanceConfig(Section):
    """Lossy: a draft passes with p > min(epsilon, alpha · exp(−entropy)) (Medusa, 2024, section 2.3.1)."""

    kind: Literal["typical"] = "typical"
    lossless: ClassVar[bool] = False
    epsilon: Annotated[float, Field(gt=0.0, le=1.0)] = 0.09
    """Highest threshold, which applies if the target's entropy is low."""
    alpha: Annotated[float, Field(gt=0.0, le=1e9)] = 0.3
    """Factor of the threshold if the target's entropy is high."""
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 0.7
    """Temperature of the target's distribution on greedy rows."""


class LanternAcceptanceConfig(Section):
    """Lossy, image models only: a draft may replace one of its nearest codes (LANTERN, 2024; LANTERN++, 2025)."""

    kind: Literal["lantern"] = "lantern"
    lossless: ClassVar[bool] = False
    k: Annotated[int, Field(ge=1, le=1000)] = 1000
    """Number of nearest codes in a neighbourhood."""
    k_counts_draft: bool = True
    """Whether the draft counts among the k (papers) or in addition to them (public code)."""
    delta: Annotated[float, Field(ge=0.0, le=1e6)] = 0.1
    """Δ, the bound of the divergence; λ for `multiplicative`."""
    divergence: Literal["tvd", "jsd", "multiplicative"] = "tvd"
    """Measure of the change of the target's distribution: `tvd`, `jsd` (nats) or `multiplicative` (LANTERN++)."""
    draw: Literal["coupled", "paper", "code"] = "coupled"
    """Sampling: relax the target's draw with shared noise (`coupled`), or draw from the residual of the `paper` or of
    the public `code`."""
    metric: Literal["l2", "cosine", "random"] = "l2"
    """Distance between codes: `l2`, `cosine`, or `random` neighbours as a baseline."""
    codebook: Literal["raw", "normalised"] = "raw"
    """Code vectors: as stored (`raw`), or scaled to unit length (`normalised`)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the metric `random`."""

    @model_validator(mode="after")
    def _bound(self) -> LanternAcceptanceConfig:
        if self.divergence == "multiplicative" and self.delta < 1.0:
            raise ValueError(f"delta {self.delta} is λ for the divergence multiplicative, and must be at least 1")
        if self.divergence != "multiplicative" and self.delta > 1.0:
            raise ValueError(
                f"delta {self.delta}: {self.divergence} is never above 1; larger values of the public code are "
                "LANTERN++'s λ, which is divergence: multiplicative"
            )
        if self.codebook == "normalised" and self.metric != "l2":
            reason = "compares directions already" if self.metric == "cosine" else "compares no codes"
            raise ValueError(f"codebook normalised changes nothing for the metric {self.metric}, which {reason}")
        if self.seed and self.metric != "random":
            raise ValueError(f"seed {self.seed} is for the metric random; {self.metric} draws nothing")
        return self


BuiltInAcceptanceConfig = Annotated[
    ExactAcceptanceConfig
    | RejectionAcceptanceConfig
    | LVSpecAcceptanceConfig
    | FlyAcceptanceConfig
    | RandomAcceptanceConfig
    | TypicalAcceptanceConfig
    | LanternAcceptanceConfig,
    Field(discriminator="kind"),
]
AcceptanceConfig = Annotated[
    Annotated[BuiltInAcceptanceConfig, Tag(BUILT_IN)] | Annotated[ExternalAcceptanceConfig, Tag(EXTERNAL)],
    Discriminator(kind_tag),
]


class AuditConfig(Section):
    """Decodes a share of the rows plainly too, beside a lossy method, and bounds the loss; see the
    [guide](../guides/audit.md)."""

    share: Annotated[float, Field(gt=0.0, le=1.0)]
    """The share of rows that are decoded twice, chosen by a hash of `job.seed` and the row's id."""
    metric: Annotated[str, Field(pattern=r"^(exact|edit|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "exact"
    """Loss of a row: `exact` (1 if tokens differ, else 0), `edit` (edit distance of the tokens over the longer length),
    or a Python function `module:function` that receives the row's text and the plain text, and returns a number from 0
    to 1."""
    max_loss: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """The budget: largest mean loss of the job; by default the loss is only reported."""
    on_exceeded: Literal["stop", "lossless"] = "stop"
    """What follows if the budget is exceeded: `stop` ends the job with exit status 4; `lossless` decodes the rows that
    are left with acceptance `exact`."""
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95
    """Confidence of the interval of the mean loss, at all numbers of rows together."""
    min_rows: Annotated[int, Field(ge=1)] = 1000
    """The budget is exceeded if the interval is above `max_loss`; from this number of audited rows on, also if its
    upper end is."""
