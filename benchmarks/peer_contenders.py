"""What is measured: engines, their variants, and how each is started. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """One measured configuration: `row` is what it competes as, `variant` how it differs from others of that row."""

    name: str
    row: str
    variant: str
    module: str
    mode: str
    single: bool = False
    """Whether it takes one sample at a time only."""

    @property
    def is_vllm(self) -> bool:
        """Whether it needs vLLM's environment."""
        return self.module == "benchmarks.peer_vllm"


ENGINE, TRANSFORMERS, VLLM = (f"benchmarks.peer_{name}" for name in ("engine", "transformers", "vllm"))
CONTENDERS = (
    Contender("engine_plain", "draftfleet", "", ENGINE, "plain"),
    Contender("engine_chain", "draftfleet, drafter", "always γ", ENGINE, "chain"),
    Contender("engine_controlled", "draftfleet, drafter", "controller", ENGINE, "controlled"),
    Contender("generate_eager", "transformers", "eager", TRANSFORMERS, "eager"),
    Contender("generate_compiled", "transformers", "compiled", TRANSFORMERS, "compiled"),
    Contender("assisted", "transformers, drafter", "whole drafts", TRANSFORMERS, "assisted", single=True),
    Contender(
        "assisted_confident",
        "transformers, drafter",
        "stops when unsure",
        TRANSFORMERS,
        "assisted_confident",
        single=True,
    ),
    Contender("vllm_plain", "vLLM", "", VLLM, "plain"),
    Contender("vllm_draft_model", "vLLM, drafter", "", VLLM, "draft_model"),
    Contender("vllm_ngram", "vLLM, n-grams", "", VLLM, "ngram"),
)
