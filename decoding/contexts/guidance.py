"""One lane of a guided model as a context: an independent image drafter is guided as its target is."""

from __future__ import annotations

from decoding.contracts import Probe
from decoding.types import Request
from models.contract import TargetModel
from models.prefix import Prefix


class GuidanceLane:
    """The conditional (0) or the unconditional (1) lane of the drafter's own model."""

    needs_attention = False

    def __init__(self, lane: int) -> None:
        self.lane = lane

    def build(self, request: Request, probe: Probe, model: TargetModel) -> Prefix:
        return model.encode_lanes(request.prompt, request.images, request.condition)[self.lane]
