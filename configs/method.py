"""Defines the section `method`: drafter × contexts × tree × acceptance, and which choices may be combined.

A new choice needs a class in its module of `configs`, and a constructor in `actors.loading.method`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.acceptance import (
    AcceptanceConfig,
    ExactAcceptanceConfig,
    FlyAcceptanceConfig,
    LanternAcceptanceConfig,
    RejectionAcceptanceConfig,
)
from configs.contexts import CaptionContextConfig, ContextConfig, EnsembleConfig, FullContextConfig
from configs.drafters import (
    DrafterConfig,
    GrammarDrafterConfig,
    JacobiDrafterConfig,
    ModelDrafterConfig,
    MtpDrafterConfig,
    NoDrafterConfig,
    SuffixDrafterConfig,
)
from configs.section import Section, removed_defaults, short_kind
from configs.trees import ChainTreeConfig, SageTreeConfig, TreeConfig, max_depth


class NoControllerConfig(Section):
    """Every step drafts to the depth of `tree`."""

    kind: Literal["none"] = "none"


class MeasuredControllerConfig(Section):
    """Each step drafts to the depth with the most expected tokens per second, up to the depth of `tree`, or not at all
    if plain decoding is faster. Acceptance must be `exact`."""

    kind: Literal["measured"] = "measured"
    max_exploration: Annotated[float, Field(ge=0.0, le=0.5)] = 0.01
    """Largest share of steps, and of time, for trials of other depths."""


ControllerConfig = Annotated[NoControllerConfig | MeasuredControllerConfig, Field(discriminator="kind")]


class AutoMethodConfig(Section):
    """Several methods, plain decoding included; each engine keeps the one that is fastest on its first rows."""

    candidates: Annotated[tuple[MethodConfig, ...], Field(min_length=1, max_length=8)]
    """Methods, each a section or a name, with acceptance `exact`. Each engine [tries](../methods/auto.md) them and
    plain decoding on its first rows, and keeps the fastest one."""
    max_rounds: Annotated[int, Field(ge=1, le=50)] = 6
    """Maximum number of blocks of rows that each candidate decodes in a trial."""
    min_rounds: Annotated[int, Field(ge=1, le=50)] = 1
    """Minimum number of blocks that each candidate decodes before slower ones leave the trial."""
    max_rechecks: Annotated[int, Field(ge=0, le=1000)] = 3
    """Maximum number of further trials of an engine, each after its acceptance length has changed."""

    @model_validator(mode="after")
    def _comparable(self) -> AutoMethodConfig:
        if self.min_rounds > self.max_rounds:
            raise ValueError(f"min_rounds ({self.min_rounds}) is larger than max_rounds ({self.max_rounds})")
        for index, candidate in enumerate(self.candidates):
            where = f"candidates.{index}"
            if candidate.auto is not None:
                raise ValueError(f"{where}: a candidate names one method, and not several")
            if not isinstance(candidate.acceptance, ExactAcceptanceConfig):
                raise ValueError(
                    f"{where}.acceptance: '{candidate.acceptance.kind}' may give other tokens than the other "
                    "candidates, and the rows of a trial are results; use exact"
                )
            if any(isinstance(context, CaptionContextConfig) for context in candidate.contexts):
                raise ValueError(f"{where}.contexts: every trial would load the captioner again; leave out 'caption'")
        kinds = [candidate.drafter.kind for candidate in self.candidates if candidate.needs_checkpoint]
        if len(set(kinds)) > 1:
            raise ValueError(
                f"candidates: {' and '.join(sorted(set(kinds)))} drafters are different checkpoints, and model.drafter "
                "names one; keep one kind, and drafters without a checkpoint beside it"
            )
        plain = [candidate for candidate in self.candidates if isinstance(candidate.drafter, NoDrafterConfig)]
        labels = [candidate.label for candidate in self.methods]
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        if len(plain) > 1 or repeated:
            what = f"two are called '{repeated[0]}'; give each a name" if repeated else "plain decoding is named twice"
            raise ValueError(f"candidates: {what}")
        if len(labels) == 1:
            raise ValueError("candidates: plain decoding is always tried; name a method that it is compared with")
        return self

    @property
    def methods(self) -> tuple[MethodConfig, ...]:
        """All candidates, plain decoding first."""
        plain = [entry for entry in self.candidates if isinstance(entry.drafter, NoDrafterConfig)] or [MethodConfig()]
        return (plain[0], *(candidate for candidate in self.candidates if candidate is not plain[0]))


class MethodConfig(Section):
    """A speculative-decoding method: drafter × contexts × tree × acceptance; or several candidates for a trial."""

    name: str | None = None
    """The method's name in rows and reports; by default composed of the choices."""
    auto: AutoMethodConfig | None = None
    """Candidates of a trial, in place of drafter, contexts, tree and acceptance."""
    drafter: DrafterConfig = NoDrafterConfig()
    contexts: tuple[ContextConfig, ...] = (FullContextConfig(),)
    tree: TreeConfig = ChainTreeConfig()
    acceptance: AcceptanceConfig = ExactAcceptanceConfig()
    controller: ControllerConfig = NoControllerConfig()
    forced_tokens: bool = False
    """Whether tokens that `output` forces are drafted in place of the drafter's, whose other drafts are restricted to
    what `output` allows; see the [drafter `grammar`](../methods/grammar.md)."""

    @model_validator(mode="after")
    def _legal(self) -> MethodConfig:
        for name, field in type(self).model_fields.items():
            if self.auto is not None and name not in ("name", "auto") and getattr(self, name) != field.default:
                raise ValueError(f"{name}: the candidates of auto have their own; leave it out beside auto")
        if not self.contexts:
            raise ValueError("contexts: give at least one; [{kind: full}] is the default")
        if isinstance(self.drafter, ModelDrafterConfig):
            self._check_ensemble(self.drafter.ensemble)
        elif self.contexts != (FullContextConfig(),):
            raise ValueError(f"contexts: the drafter '{self.drafter.kind}' has no prompt of its own to change")
        self._check_acceptance()
        self._check_lines()
        self._check_controller()
        if self.forced_tokens and isinstance(self.drafter, NoDrafterConfig | GrammarDrafterConfig):
            raise ValueError(
                f"forced_tokens: '{self.drafter.kind}' has no drafts beside them; use the drafter 'grammar' without it"
            )
        return self

    def _check_acceptance(self) -> None:
        rule = self.acceptance
        if isinstance(self.drafter, NoDrafterConfig) and not rule.lossless:
            raise ValueError(f"acceptance: '{rule.kind}' relaxes drafts, and the drafter 'none' makes none; use exact")
        draws_residuals = isinstance(rule, RejectionAcceptanceConfig) or (
            isinstance(rule, LanternAcceptanceConfig) and rule.draw != "coupled"
        )
        if draws_residuals and isinstance(self.tree, SageTreeConfig) and self.tree.growth == "online":
            other = "acceptance.draw coupled" if isinstance(rule, LanternAcceptanceConfig) else "acceptance exact"
            raise ValueError(
                "tree.growth 'online' keeps drafts by the probability of the drawn token, which would bias rejection "
                f"sampling; use growth 'planned', or {other}"
            )
        if isinstance(rule, FlyAcceptanceConfig) and rule.window > 0 and (deepest := max_depth(self.tree)):
            needed = rule.window + 1 + (rule.block_end == "margin")
            if deepest < needed:
                raise ValueError(
                    f"acceptance.window {rule.window} needs blocks of at least {needed} drafts before anything can be "
                    f"relaxed, and the tree is {deepest} deep; draft deeper, or take a smaller window"
                )

    def _check_lines(self) -> None:
        """Check tree and acceptance of the drafters that propose one token per depth."""
        drafter, rule = self.drafter, self.acceptance
        if not isinstance(drafter, JacobiDrafterConfig | SuffixDrafterConfig | GrammarDrafterConfig):
            return
        if not isinstance(self.tree, ChainTreeConfig):
            raise ValueError(
                f"tree: the drafter '{drafter.kind}' proposes one token per depth, and a tree '{self.tree.kind}' would "
                "verify nodes without drafts; use chain"
            )
        if isinstance(drafter, SuffixDrafterConfig) and not isinstance(rule, ExactAcceptanceConfig):
            raise ValueError(
                "acceptance: drafts of 'suffix' follow from the rows that finished before in the same actor, and under "
                f"acceptance '{rule.kind}' tokens follow from drafts, so that no run could be repeated; use exact"
            )
        if isinstance(drafter, JacobiDrafterConfig) and rule.kind not in ("exact", "rejection", "typical", "lantern"):
            raise ValueError(
                f"acceptance: '{rule.kind}' accepts drafts that the target finds unlikely, and drafts of 'jacobi' are "
                "choices after wrong tokens, or fillers; use exact, rejection, typical or lantern"
            )

    def _check_controller(self) -> None:
        """Check that the method has a drafter and exact acceptance, under which depths do not change tokens."""
        if isinstance(self.controller, NoControllerConfig):
            return
        if isinstance(self.drafter, NoDrafterConfig):
            raise ValueError(f"controller: '{self.controller.kind}' has nothing to decide where the drafter is 'none'")
        if not isinstance(self.acceptance, ExactAcceptanceConfig):
            raise ValueError(
                f"controller: '{self.controller.kind}' chooses depths by the clock, and under acceptance "
                f"'{self.acceptance.kind}' tokens follow from depths, so that no run could be repeated; use exact"
            )

    def _check_ensemble(self, ensemble: EnsembleConfig | None) -> None:
        num_lanes = len(self.contexts)
        if num_lanes == 1 and ensemble is not None:
            raise ValueError("drafter.ensemble weighs several contexts, but contexts names one")
        if ensemble is None:
            return
        weights = ensemble.static_weights
        if weights and len(weights) != num_lanes:
            raise ValueError(f"drafter.ensemble.static_weights has {len(weights)} numbers for {num_lanes} contexts")
        if ensemble.policy in ("matches", "error"):
            size = math.comb(ensemble.steps + num_lanes - 1, num_lanes - 1)
            if size > 2000:
                raise ValueError(f"drafter.ensemble: a grid of {size} weights; use fewer steps or inverse_linear")

    @property
    def methods(self) -> tuple[MethodConfig, ...]:
        """All methods that may decode a row: this method, or plain decoding and the candidates of `auto`."""
        return (self,) if self.auto is None else self.auto.methods

    @property
    def places(self) -> dict[str, MethodConfig]:
        """The methods that the job file spells out, by dotted path: this method, or the candidates of `auto`."""
        if self.auto is None:
            return {"method": self}
        return {f"method.auto.candidates.{index}": candidate for index, candidate in enumerate(self.auto.candidates)}

    @property
    def needs_checkpoint(self) -> bool:
        """Whether the drafter needs weights from `model.drafter`."""
        return self.drafting.drafter.kind in ("model", "eagle", "eagle3", "vispec", "msd", "medusa", "block")

    @property
    def needs_mtp(self) -> bool:
        """Whether this method, or a candidate of `auto`, drafts with the MTP layer of the target's checkpoint."""
        return any(isinstance(method.drafter, MtpDrafterConfig) for method in self.methods)

    @property
    def drafts_grammar(self) -> bool:
        """Whether drafts follow the section `output`."""
        return self.forced_tokens or isinstance(self.drafter, GrammarDrafterConfig)

    @property
    def drafting(self) -> MethodConfig:
        """The method that determines the kind of `model.drafter`: this one, or a candidate of `auto`."""
        if self.auto is None:
            return self
        return next((candidate for candidate in self.auto.methods if candidate.needs_checkpoint), self.auto.methods[-1])

    def content(self) -> dict[str, Any]:
        """Return all fields that determine the output."""
        data = self.model_dump(mode="json")
        if self.auto is not None:
            return {"auto": [candidate.content() for candidate in self.auto.methods]}
        if isinstance(self.drafter, NoDrafterConfig):
            return {"drafter": data["drafter"], "acceptance": data["acceptance"]}
        del data["auto"]
        if isinstance(self.tree, SageTreeConfig):
            data["tree"] |= removed_defaults("tree")
        # A controller requires exact acceptance, so it changes no token.
        del data["controller"]
        if not self.forced_tokens:
            # Outputs that were begun before this key existed have the same content.
            del data["forced_tokens"]
        return data

    @property
    def verify_mode(self) -> Literal["lossless", "lossy"]:
        """`lossless` if the output has the target's distribution, else `lossy`; a column of every output row."""
        return "lossless" if self.acceptance.lossless else "lossy"

    @property
    def label(self) -> str:
        """The method's name in rows and reports."""
        if self.name:
            return self.name
        if self.auto is not None:
            return "auto"
        if isinstance(self.drafter, NoDrafterConfig):
            return "plain"
        forced = "grammar+" if self.forced_tokens else ""
        return forced + "+".join(short_kind(part.kind) for part in (self.drafter, self.tree, self.acceptance))


AutoMethodConfig.model_rebuild()
