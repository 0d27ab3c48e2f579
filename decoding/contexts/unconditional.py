"""What a guided model sees where the condition is left out: its drafter's second lane."""

from __future__ import annotations

from decoding.contracts import Probe
from decoding.types import Request
from models.contract import TargetModel
from models.inputs.prefix import Prefix


class Unconditional:
    """The unconditional lane of the drafter's own model."""

    needs_attention = False

    def build(self, request: Request, probe: Probe, model: TargetModel) -> Prefix:
        return model.encode_lanes(request.prompt, request.images, request.condition, request.videos)[1]
