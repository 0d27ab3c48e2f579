"""Acceptance rules: decide which drafts are accepted, and the target's token after them."""

from decoding.acceptance.exact import Exact
from decoding.acceptance.fly import Fly
from decoding.acceptance.lantern import Lantern
from decoding.acceptance.lantern_residual import LanternResidual
from decoding.acceptance.lvspec import LVSpec
from decoding.acceptance.random import RandomRelaxation
from decoding.acceptance.rejection import Rejection
from decoding.acceptance.typical import Typical

__all__ = [
    "Exact",
    "Fly",
    "LVSpec",
    "Lantern",
    "LanternResidual",
    "RandomRelaxation",
    "Rejection",
    "Typical",
]
