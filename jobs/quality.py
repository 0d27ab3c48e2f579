"""`python -m jobs.quality OUT [OTHER]`: measure the images of an output with an image-text model of yours.

Prints the cosine of images and prompts (100 × is the CLIP score), and the squared Fréchet distance of their features to
those of reference images, each with a 95 % interval. Two outputs, such as LANTERN's and plain decoding's of the same
prompts, are compared image by image.

Exit status: 0 measured, 2 refused: an output holds no images, or a checkpoint or folder cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers.utils.logging import disable_progress_bar

from configs.load import ConfigError
from jobs.terminal.arguments import new_parser
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.scorer import Scorer
from pipeline.output.recorded_job import read_any_job
from pipeline.quality.measure import (
    MIN_IMAGES,
    Difference,
    Quality,
    QualityFigure,
    compare,
    features_of,
    measure,
    read_images,
    read_references,
    reference_features,
)

MEASURED, REFUSED = 0, 2
MAX_IMAGES = 100_000


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("quality", __doc__ or "", "out/lantern out/plain --scorer openai/clip-vit-base-patch32")
    add = parser.add_argument
    add("output", metavar="OUT", help="the output directory of a synthesis job, its sink.path")
    add("other", metavar="OTHER", nargs="?", help="another output of the same prompts")
    add("--scorer", required=True, metavar="PATH", help="a CLIP or SigLIP checkpoint: a folder, or a name on the hub")
    add("--references", metavar="FOLDER", help="a folder of real images (.png, .jpg, .webp) for the distance")
    about = f"at most N images of each output and of the references; default 10000, at most {MAX_IMAGES:,}"
    add("--limit", type=int, default=10_000, metavar="N", help=about)
    add("--device", default="auto", help="device of the scorer; default auto")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one or two outputs and return the exit status."""
    arguments = parser().parse_args(argv)
    try:
        if not MIN_IMAGES <= arguments.limit <= MAX_IMAGES:
            raise ConfigError(f"--limit: must be from {MIN_IMAGES} to {MAX_IMAGES:,}, not {arguments.limit}")
        given = [(name, path) for name, path in (("OUT", arguments.output), ("OTHER", arguments.other)) if path]
        jobs = [(name, read_any_job(path, name)) for name, path in given]
        scorer = _scorer(arguments.scorer, arguments.device)
        references = None
        if arguments.references:
            images = read_references(arguments.references, "--references", arguments.limit)
            references = reference_features(scorer, images)
            if len(references) < MIN_IMAGES:
                raise ConfigError(f"--references: {len(references)} images, and {MIN_IMAGES} are needed")
        features = [features_of(scorer, read_images(job, name, arguments.limit)) for name, job in jobs]
        for (name, _), found in zip(jobs, features, strict=True):
            if len(found.ids) < MIN_IMAGES:
                raise ConfigError(f"{name}: {len(found.ids)} images with prompts, and {MIN_IMAGES} are needed")
        qualities = [measure(side, references) for side in features]
        difference = compare(features[0], features[1], references) if len(features) == 2 else None
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    names = [path for _, path in given]
    if arguments.json:
        print(json.dumps(_record(names, qualities, difference)))
    else:
        print(*_lines(names, qualities, difference), sep="\n")
    return MEASURED


def _scorer(path: str, device: str) -> Scorer:
    disable_progress_bar()
    try:
        return Scorer.load(CheckpointRef(path), "auto", device)
    except CheckpointError as error:
        raise ConfigError(f"--scorer: {error}") from None


def _record(names: Sequence[str], found: Sequence[Quality], difference: Difference | None) -> dict[str, Any]:
    outputs = [{"output": name, **asdict(quality)} for name, quality in zip(names, found, strict=True)]
    for entry, quality in zip(outputs, found, strict=True):
        entry["detectable"] = quality.detectable
        del entry["folds"]
    return {"outputs": outputs, "difference": None if difference is None else asdict(difference)}


def _lines(names: Sequence[str], found: Sequence[Quality], difference: Difference | None) -> list[str]:
    lines = []
    for name, quality in zip(names, found, strict=True):
        lines.append(f"{name}: {quality.num_images:,} images")
        lines.append(f"  agreement with prompts  {_shown(quality.agreement, 4)}")
        if quality.distance is not None:
            lines.append(f"  distance to references  {_shown(quality.distance, 3)}")
            if quality.detectable is not None:
                share = f"{100 * quality.detectable:.0f} %"
                lines.append(f"  smallest change of the distance that two such outputs decide without pairs: {share}")
    if difference is not None:
        lines.append(f"{names[0]} less {names[1]}: {difference.num_images:,} images of the same prompts and replicas")
        agreement, distance = difference.agreement, difference.distance
        lines.append(f"  agreement with prompts  {_shown(agreement, 4)}  {_verdict(agreement, 1)}")
        if distance is not None:
            lines.append(f"  distance to references  {_shown(distance, 3)}  {_verdict(distance, -1)}")
    return lines


def _shown(estimate: QualityFigure, digits: int) -> str:
    return f"{estimate.value:.{digits}f} ± {estimate.margin:.{digits}f}"


def _verdict(estimate: QualityFigure, better: int) -> str:
    """Return whether the first output is better, worse, or neither is decided."""
    if not estimate.decides():
        return "not decided"
    return "better" if estimate.value * better > 0 else "worse"


if __name__ == "__main__":
    sys.exit(main())
