"""Makes the inputs that all peers of a run share: inflated models and prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.engines import encode, front_end_of
from benchmarks.harness.process import Work
from benchmarks.harness.results import progress
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.shapes import named_shape
from zoo.pair import CHECKPOINTS

GAMMA = 5
"""Drafts per step."""


def inflated_pair(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folders of the text pair, target and drafter, inflated in the scratch folder unless they exist."""
    folders = []
    for name, shape in (("text_target", options.target_shape), ("text_drafter", options.drafter_shape)):
        folders.append(options.scratch / "pairs" / f"{name}-{shape}-{options.dtype}")
        if not folders[-1].exists():
            progress(f"making {folders[-1]}")
            inflate_folder(CHECKPOINTS / name, folders[-1], named_shape(shape), options.dtype)
    return folders[0], folders[1]


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
