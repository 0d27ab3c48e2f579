"""The whole prompt, images and videos included, as the target sees it."""

from __future__ import annotations

from decoding.contracts import Probe
from decoding.types import Request
from models.contract import TargetModel
from models.inputs.prefix import Prefix


class Full:
    """Everything the sample has."""

    needs_attention = False

    def build(self, request: Request, probe: Probe, model: TargetModel) -> Prefix:
        return model.encode_lanes(request.prompt, request.images, request.condition, request.videos)[0]
