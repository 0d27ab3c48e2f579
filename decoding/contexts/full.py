"""Encodes the whole prompt with the drafter's own model, for one of its lanes."""

from __future__ import annotations

from decoding.contracts import Context, Probe
from decoding.types import Request
from models.contract import TargetModel
from models.inputs.prefix import Prefix


class Full(Context):
    """The whole prompt, images and videos included."""

    lane = 0

    def build(self, request: Request, probe: Probe, model: TargetModel) -> Prefix:
        return model.encode_lanes(request.prompt, request.images, request.condition, request.videos)[self.lane]


class Unconditional(Full):
    """The unconditional lane, for drafters of targets with classifier-free guidance."""

    lane = 1
