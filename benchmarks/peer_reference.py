"""What the target itself says, in fp32: tokens, and how near every choice was. `python -m benchmarks.peer_reference …`

The slow and plain way that all peers are held against: transformers' eager `generate`. Kept in a file beside the work
that it belongs to, because a benchmark is repeated more often than its prompts change.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_process import Work
from benchmarks.peer_transformers import batches, cut, end_ids, load_model, pad_left

BATCH = 16


def key_of(work: Work) -> str:
    """A name for all that the reference depends on: the target's files, the prompts and the limits."""
    told = hashlib.sha256()
    for path in sorted(Path(work.target).iterdir()):
        if path.suffix in (".json", ".safetensors"):
            told.update(path.name.encode())
            told.update(path.read_bytes())
    told.update(json.dumps([work.prompt_ids, work.max_new_tokens, work.ignore_eos]).encode())
    return told.hexdigest()[:16]


@torch.inference_mode()
def make_reference(work: Work) -> list[dict[str, Any]]:
    """For every prompt its `tokens`, and of each token the `top` logit and its `gap` to the second."""
    torch.set_num_threads(work.threads)
    model = load_model(work.target, "float32", work.ignore_eos)
    ends, pad = end_ids(model), model.generation_config.pad_token_id
    found: list[dict[str, Any]] = [{} for _ in work.prompt_ids]
    for numbers in batches(work.prompt_ids, BATCH):
        inputs = pad_left([work.prompt_ids[number] for number in numbers], pad)
        made = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=work.max_new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack([logits.topk(2).values for logits in made.logits], dim=1)  # (b, tokens, 2)
        rows = made.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        for row, number in enumerate(numbers):
            tokens = cut(rows[row], ends)
            near = best[row, : len(tokens)]
            found[number] = {
                "tokens": tokens,
                "top": near[:, 0].tolist(),
                "gap": (near[:, 0] - near[:, 1]).tolist(),
            }
    return found


def main() -> int:
    """Write the reference of the work file of the command line to the second path."""
    work, place = Work.read(sys.argv[1]), Path(sys.argv[2])
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(make_reference(work)))
    partial.replace(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
