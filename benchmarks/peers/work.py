"""Makes the inputs that all peers of a run share: inflated models, prompts, and the target's own outputs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.engines import encode, front_end_of
from benchmarks.harness.process import ROOT, PeerError, Work
from benchmarks.harness.results import progress, read_results
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.shapes import named_shape
from benchmarks.peers.reference import key_of
from zoo.pair import CHECKPOINTS


def inflated(name: str, shape: str, dtype: str, scratch: Path) -> Path:
    """Return the folder of a zoo checkpoint inflated to `shape`, made if it does not exist."""
    folder = scratch / "pairs" / f"{name}-{shape}-{dtype}"
    if not folder.exists():
        progress(f"making {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        inflate_folder(CHECKPOINTS / name, folder, named_shape(shape), dtype)
    return folder


def inflated_pair(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folders of the inflated text pair: target and drafter."""
    return (
        inflated("text_target", options.target_shape, options.dtype, options.scratch),
        inflated("text_drafter", options.drafter_shape, options.dtype, options.scratch),
    )


def make_work(
    options: argparse.Namespace, target: Path, drafter: Path, texts: list[str], max_new_tokens: int, max_batch: int
) -> Work:
    """Return prompts and limits for all peers; the context window has room for a whole draft after the last token."""
    ids = encode(front_end_of(target), texts)
    longest = max(map(len, ids)) + max_new_tokens + options.gamma + 1
    return Work(
        target=str(target),
        drafter=str(drafter),
        dtype=options.dtype,
        threads=options.threads,
        gamma=options.gamma,
        max_batch=max_batch,
        max_context_tokens=-(-longest // 32) * 32,
        max_new_tokens=max_new_tokens,
        ignore_eos=False,
        prompt_texts=texts,
        prompt_ids=ids,
    )


def reference_of(work: Work, variables: Mapping[str, str], scratch: Path) -> list[dict[str, Any]]:
    """Return the target's own outputs, cached in `scratch` and made by a separate process.

    Raises:
        PeerError: that process fails.
    """
    place = scratch / f"reference-{key_of(work)}.json"
    if not place.exists():
        progress(f"decoding the reference in fp32: {len(work.prompt_ids)} prompts")
        work_file = place.with_suffix(".work.json")
        work.write(work_file)
        command = [sys.executable, "-m", "benchmarks.peers.reference", str(work_file), str(place)]
        done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"the reference could not be made:\n{done.stderr[-2000:]}")
    found: list[dict[str, Any]] = read_results(place)
    return found


def by_batch(option: str, batches: Sequence[int], numbers: Sequence[int]) -> dict[int, int]:
    """Return an option's number for each batch size, from one number for all or one number each.

    Raises:
        ValueError: the option has neither one number nor one per batch size.
    """
    if len(numbers) not in (1, len(batches)):
        raise ValueError(f"{option} takes one number or {len(batches)}, one for each batch size")
    return dict(zip(batches, list(numbers) * (len(batches) if len(numbers) == 1 else 1), strict=True))
