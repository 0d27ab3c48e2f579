"""Records the outputs of transformers' video processors, for environments in which they cannot run.

They need torchvision, which does not import beside every build of torch. What it takes is its Python files for the
torch that is installed; resizing and normalising are those files over torch's own kernels, and only the compiled
operators for boxes, which no video processor calls, may be missing:

    pip install --no-deps --target /tmp/torchvision torchvision==0.28.0        # for torch 2.13
    PYTHONPATH=/tmp/torchvision python -m tests.models.official_videos         # writes official_videos.safetensors

Recorded with transformers 5.23.0, torch 2.13.0 and torchvision 0.28.0 on x86-64.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def import_torchvision() -> None:
    """Import torchvision; where its compiled operators do not load, those that its Python names get an empty entry."""
    try:
        import torchvision
    except RuntimeError:
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        import torchvision  # noqa: F401


def official(name: str) -> dict[str, Tensor]:
    """What transformers' own processor makes of it."""
    import transformers

    from tests.models.video_cases import CASES, KIND_OF, LlavaOnevisionProcessor, build, picture

    case = CASES[name]
    settings = {"cap_pixels_per_frame": False, **case.settings}
    if case.processor is LlavaOnevisionProcessor:
        del settings["cap_pixels_per_frame"]
    part = getattr(transformers, KIND_OF[case.processor.__name__])(**settings)
    made = build(case.processor, case, part)
    shown: dict[str, Any] = {"images": [picture()]} if case.image else {}
    inputs = made(
        text=case.prompt,
        videos=[video.frames(seed) for seed, video in enumerate(case.videos)],
        video_metadata=[video.metadata for video in case.videos],
        do_sample_frames=False,
        return_tensors="pt",
        **shown,
    )
    return {key: value for key, value in inputs.items() if isinstance(value, Tensor)}


def main() -> None:
    import_torchvision()
    from tests.models.video_cases import CASES, RECORDED, thinned

    recorded = {}
    for name in CASES:
        for key, value in official(name).items():
            recorded[f"{name}/{key}/shape"] = torch.tensor(value.shape)
            recorded[f"{name}/{key}"] = thinned(value).contiguous().clone()
    save_file(recorded, RECORDED)
    print(f"{RECORDED.name}: {len(CASES)} cases, {RECORDED.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
