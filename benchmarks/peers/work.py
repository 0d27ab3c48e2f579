"""Makes the inputs that all peers of a run share: inflated models, prompts, and the reference.

The reference is the target's own tokens and logit gaps in fp32, by transformers' `generate`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.engines import encode, front_end_of
from benchmarks.harness.process import Work
from benchmarks.harness.results import progress
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.shapes import named_shape
from benchmarks.peers.transformers_peer import batches, cut, end_ids, load_model, pad_left
from zoo.pair import CHECKPOINTS

GAMMA = 5
"""Drafts per step."""
REFERENCE_BATCH = 16
WORK_FILE = "work.json"
"""The file in the scratch folder that all peers read."""


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
    """Return the pair, prompts and limits for all peers, and write them in the scratch folder."""
    target, drafter = inflated_pair(options)
    folders = (str(target), str(drafter))
    return write_work(folders, options.dtype, options.threads, texts, max_new_tokens, max_batch, options.scratch)


def write_work(
    folders: tuple[str, str],
    dtype: str,
    threads: int,
    texts: list[str],
    max_new_tokens: int,
    max_batch: int,
    scratch: Path,
) -> Work:
    """Write `WORK_FILE` in the scratch folder for the folders of a target and a drafter, which may be ""; return it.

    The context window has room for a whole draft after the last token.
    """
    ids = encode(front_end_of(Path(folders[0])), texts)
    longest = max(map(len, ids)) + max_new_tokens + GAMMA + 1
    work = Work(
        target=folders[0],
        drafter=folders[1],
        dtype=dtype,
        threads=threads,
        gamma=GAMMA,
        max_batch=max_batch,
        max_context_tokens=-(-longest // 32) * 32,
        max_new_tokens=max_new_tokens,
        ignore_eos=False,
        prompt_texts=texts,
        prompt_ids=ids,
    )
    scratch.mkdir(parents=True, exist_ok=True)
    work.write(scratch / WORK_FILE)
    return work


def key_of(work: Work) -> str:
    """Return a hash of all inputs of the reference: the target's files, the prompts and the limits."""
    digest = hashlib.sha256()
    for path in sorted(Path(work.target).iterdir()):
        if path.suffix in (".json", ".safetensors"):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    digest.update(json.dumps([work.prompt_ids, work.max_new_tokens, work.ignore_eos]).encode())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def make_reference(work: Work) -> list[dict[str, Any]]:
    """Decode all prompts greedily in float32 with transformers' `generate`. Return a dictionary per prompt: `tokens`;
    for each token the largest logit (`top`) and its distance to the second largest (`gap`)."""
    torch.set_num_threads(work.threads)
    model = load_model(work.target, "float32", work.ignore_eos)
    ends, pad = end_ids(model), model.generation_config.pad_token_id
    reference: list[dict[str, Any]] = [{} for _ in work.prompt_ids]
    for numbers in batches(work.prompt_ids, REFERENCE_BATCH):
        inputs = pad_left([work.prompt_ids[number] for number in numbers], pad)
        output = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=work.max_new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack([logits.topk(2).values for logits in output.logits], dim=1)  # (b, tokens, 2)
        rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        for row, number in enumerate(numbers):
            tokens = cut(rows[row], ends)
            near = best[row, : len(tokens)]
            gap = (near[:, 0] - near[:, 1]).tolist()
            reference[number] = {"tokens": tokens, "top": near[:, 0].tolist(), "gap": gap}
    return reference


def reference_of(work: Work, scratch: Path) -> list[dict[str, Any]]:
    """Return `make_reference`, cached in `scratch`."""
    path = scratch / f"reference-{key_of(work)}.json"
    if not path.exists():
        progress(f"decoding the reference in fp32: {len(work.prompt_ids)} prompts")
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(make_reference(work)))
        partial.replace(path)
    reference: list[dict[str, Any]] = json.loads(path.read_text())
    return reference
