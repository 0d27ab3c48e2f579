"""Drafters: propose draft tokens."""

from decoding.drafters.block import BlockDrafter
from decoding.drafters.eagle import EagleDrafter
from decoding.drafters.grammar import GrammarDrafter
from decoding.drafters.jacobi import JacobiDrafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.lookup import LookupDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.model import ModelDrafter
from decoding.drafters.mtp import MtpDrafter
from decoding.drafters.none import NoDrafter
from decoding.drafters.parallel_eagle import ParallelEagleDrafter
from decoding.drafters.suffix import SuffixDrafter

__all__ = [
    "BlockDrafter",
    "EagleDrafter",
    "GrammarDrafter",
    "JacobiDrafter",
    "LayerSkipDrafter",
    "LookupDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "MtpDrafter",
    "NoDrafter",
    "ParallelEagleDrafter",
    "SuffixDrafter",
]
