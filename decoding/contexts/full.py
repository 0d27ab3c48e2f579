"""The whole prompt, as one lane of the drafter's own model."""

from __future__ import annotations

from decoding.contracts import Context, Probe
from decoding.types import Request
from models.contract import TargetModel
from models.inputs.prefix import Prefix


class Full(Context):
    """Everything the sample has, images and videos included."""

    lane = 0

    def build(self, request: Request, probe: Probe, model: TargetModel) -> Prefix:
        return model.encode_lanes(request.prompt, request.images, request.condition, request.videos)[self.lane]


class Unconditional(Full):
    """The lane without the condition, for drafters of a guided target."""

    lane = 1
