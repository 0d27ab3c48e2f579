"""Makes the inputs that all peers of a run share: inflated models, prompts, and the target's own outputs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.engines import encode, front_end_of
from benchmarks.harness.process import ROOT, PeerError, Work
from benchmarks.harness.results import progress, read_results
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.shapes import named_shape
from benchmarks.peers.reference import key_of
from zoo.pair import CHECKPOINTS

GAMMA = 5
"""Drafts per step."""


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


def make_work(options: argparse.Namespace, texts: list[str], max_new_tokens: int, max_batch: int) -> Work:
    """Return the pair, prompts and limits for all peers, and write them to `work.json` in the scratch folder.

    The context window has room for a whole draft after the last token.
    """
    target, drafter = inflated_pair(options)
    ids = encode(front_end_of(target), texts)
    longest = max(map(len, ids)) + max_new_tokens + GAMMA + 1
    work = Work(
        target=str(target),
        drafter=str(drafter),
        dtype=options.dtype,
        threads=options.threads,
        gamma=GAMMA,
        max_batch=max_batch,
        max_context_tokens=-(-longest // 32) * 32,
        max_new_tokens=max_new_tokens,
        ignore_eos=False,
        prompt_texts=texts,
        prompt_ids=ids,
    )
    work.write(options.scratch / "work.json")
    return work


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
