"""Drafters that are heads on the target: their checkpoint is `model.drafter`."""

from __future__ import annotations

from typing import Literal

from configs.section import Section


class EagleDrafter(Section):
    """EAGLE-1/2: one decoder layer over the target's own features (`model.drafter` is the head's folder)."""

    kind: Literal["eagle"] = "eagle"


class MedusaDrafter(Section):
    """Medusa: one head per draft depth on the target's last state (`model.drafter` is the heads' folder)."""

    kind: Literal["medusa"] = "medusa"
