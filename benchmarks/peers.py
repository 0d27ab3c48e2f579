"""This engine beside transformers and vLLM, one run: the same weights, prompts and outputs, batch by batch.

    python -m benchmarks.peers                      # the full grid, written to results/peers.json
    python -m benchmarks.peers --requests-per-slot 8 2 1    # a part of it, one number for each batch size; written too
    python -m benchmarks.peers --repeats 4 2 1      # passes at each batch size: one row's speed changes most
    python -m benchmarks.peers --quick              # few short requests, one launch and repeat, printed only
    python -m benchmarks.peers --tables             # the tables of the committed results

Every peer is a process of its own, stopped while another one runs, and launched several times, as the speed of one row
differs between launches; vLLM's runs in an environment that this command makes. At each batch size all peers are warmed
up, then take turns, each round in another order. Outputs are held against the target's own in fp32
(`benchmarks.peer_reference`), those of the warm-up too, and a peer whose outputs differ by more than rounding gets no
speed. `generate` is measured eagerly and compiled, assisted generation
with and without its drafter's own stop; the better of the two is its row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.inflate_files import inflate_folder
from benchmarks.inflate_shapes import InflationError, named_shape
from benchmarks.peer_contenders import CONTENDERS, Contender
from benchmarks.peer_environment import (
    EnvironmentRefused,
    base_variables,
    make_environment,
    preloads,
    python_of,
    vllm_variables,
)
from benchmarks.peer_launches import Launched, run_launch
from benchmarks.peer_process import ROOT, PeerError, Work
from benchmarks.peer_reference import key_of
from benchmarks.peer_rounds import Timed, measure_batch, turns
from benchmarks.peer_tables import peers_table, show_row
from benchmarks.peer_verdict import TOLERANCE_ULPS
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointError, CheckpointRef, read_config, read_processor
from zoo.pair import CHECKPOINTS
from zoo.text_samples import held_out_prompts

RESULTS = Path(__file__).parent / "results" / "peers.json"
SCRATCH = ROOT / ".bench"
BATCHES = (1, 8, 32)
REQUESTS_PER_SLOT = 8
QUICK_REQUESTS_PER_SLOT, QUICK_NEW_TOKENS = 2, 16
SEED = 0


def inflated(source: Path, shape: str | None, dtype: str, scratch: Path) -> Path:
    """The folder of a model in another shape, made when it is not there yet; the source itself without a shape."""
    if shape is None:
        return source
    made = scratch / "pairs" / f"{source.name}-{shape}-{dtype}"
    if not made.exists():
        print(f"making {made}", file=sys.stderr, flush=True)
        made.parent.mkdir(parents=True, exist_ok=True)
        inflate_folder(source, made, named_shape(shape), dtype)
    return made


def make_work(options: argparse.Namespace, target: Path, drafter: Path, counts: Sequence[int]) -> Work:
    """What all peers are given.

    Raises:
        SystemExit: a prompt and its answer do not fit.
    """
    ref = CheckpointRef(str(target))
    front_end = FrontEnd(read_processor(ref, read_config(ref)))
    texts = held_out_prompts(max(counts), SEED)
    if options.prompts is not None:
        texts = [line for line in options.prompts.read_text().splitlines() if line]
        if len(texts) < max(counts):
            raise SystemExit(f"{options.prompts} holds {len(texts)} prompts, and {max(counts)} are needed")
    ids = [front_end.encode(text, ())["input_ids"][0].tolist() for text in texts]
    # Room for a whole draft beyond the last token, rounded up.
    longest = max(map(len, ids)) + options.max_new_tokens + options.gamma + 1
    return Work(
        target=str(target),
        drafter=str(drafter),
        dtype=options.dtype,
        threads=options.threads,
        gamma=options.gamma,
        max_batch=max(options.batches),
        max_context_tokens=-(-longest // 32) * 32,
        max_new_tokens=options.max_new_tokens,
        ignore_eos=options.ignore_eos,
        prompt_texts=texts,
        prompt_ids=ids,
    )


def reference_of(work: Work, work_file: Path, variables: dict[str, str], scratch: Path) -> list[dict[str, Any]]:
    """The target's own outputs, made by a process of its own unless they are there.

    Raises:
        PeerError: that process fails.
    """
    place = scratch / f"reference-{key_of(work)}.json"
    if not place.exists():
        print(f"asking the target itself, in fp32: {len(work.prompt_ids)} prompts", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.peer_reference", str(work_file), str(place)]
        done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"the reference could not be made:\n{done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(place.read_text())
    return found


def measure(
    options: argparse.Namespace, contenders: Sequence[Contender], counts: dict[int, int], repeats: dict[int, int]
) -> dict[str, Any]:
    """The whole grid: how many requests at each batch size, and how many passes in each launch."""
    scratch: Path = options.scratch
    scratch.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    target = inflated(options.target, options.target_shape, options.dtype, scratch)
    drafter = inflated(options.drafter, options.drafter_shape, options.dtype, scratch)
    work = make_work(options, target, drafter, list(counts.values()))
    work_file = scratch / "work.json"
    work.write(work_file)
    variables = base_variables(options.threads, scratch, os.environ)
    vllm_folder = scratch / "vllm"
    special: dict[str, str] = {}
    if any(one.is_vllm for one in contenders):
        make_environment(vllm_folder)
        bound = cores()[: options.threads]
        special = {**vllm_variables(bound, scratch), "LD_PRELOAD": preloads(vllm_folder)}
    reference = reference_of(work, work_file, variables, scratch)
    launched = [
        Launched(
            one,
            str(python_of(vllm_folder)) if one.is_vllm else sys.executable,
            work_file,
            {**variables, **special} if one.is_vllm else variables,
            scratch / "logs" / f"{one.name}.log",
        )
        for one in contenders
    ]
    timed: dict[int, dict[str, Timed]] = {batch: {} for batch in counts}
    versions: dict[str, Any] = {}
    for launch in range(options.launches):
        print(f"launch {launch + 1} of {options.launches}", file=sys.stderr, flush=True)
        for batch, there, told in run_launch(launched, list(counts)):
            versions |= told
            orders = list(turns(list(there), options.launches * repeats[batch]))
            chosen = orders[launch * repeats[batch] : (launch + 1) * repeats[batch]]
            measure_batch(there, batch, reference[: counts[batch]], work.dtype, chosen, timed[batch])
    rows: list[dict[str, Any]] = []
    for batch, found in timed.items():
        for one in contenders:
            if one.name in found:
                told = {"batch": batch, "name": one.name, "row": one.row, "variant": one.variant}
                rows.append(told | found[one.name].row(reference[: counts[batch]], work.dtype))
                print(show_row(rows[-1]), flush=True)
    return {
        "target": options.target.name,
        "drafter": options.drafter.name,
        "target_shape": options.target_shape,
        "drafter_shape": options.drafter_shape,
        "dtype": work.dtype,
        "threads": work.threads,
        "gamma": work.gamma,
        "max_new_tokens": work.max_new_tokens,
        "ignore_eos": work.ignore_eos,
        "launches": options.launches,
        "tolerance_ulps": TOLERANCE_ULPS,
        "machine": f"{cpu_name()}, {len(cores())} cores, load {load:.1f} at the start",
        "versions": versions,
        "rows": rows,
    }


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def cpu_name() -> str:
    """The processor as it calls itself."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def by_batch(option: str, batches: Sequence[int], numbers: Sequence[int]) -> dict[int, int]:
    """An option's number at each batch size; one number stands for all sizes.

    Raises:
        ValueError: there are neither one number nor as many as batch sizes.
    """
    if len(numbers) not in (1, len(batches)):
        raise ValueError(f"{option} takes one number or {len(batches)}, one for each batch size")
    return dict(zip(batches, list(numbers) * (len(batches) if len(numbers) == 1 else 1), strict=True))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few short requests and one repeat; nothing is written")
    parser.add_argument("--tables", action="store_true", help="print the tables of the committed results and stop")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), metavar="N")
    parser.add_argument(
        "--requests-per-slot",
        type=int,
        nargs="+",
        metavar="N",
        help=f"one number or one per batch ({REQUESTS_PER_SLOT})",
    )
    parser.add_argument("--launches", type=int, help="of every peer's process: speeds differ between them (2)")
    parser.add_argument(
        "--repeats",
        type=int,
        nargs="+",
        metavar="N",
        help="timed passes of every peer in each launch, one number or one per batch (2)",
    )
    parser.add_argument("--max-new-tokens", type=int, help="(64)")
    parser.add_argument("--ignore-eos", action="store_true", help="outputs of full length instead of natural ones")
    parser.add_argument("--gamma", type=int, default=5, help="drafts of a step (5)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(cores()), help="of every peer (all cores)")
    parser.add_argument("--target", type=Path, default=CHECKPOINTS / "text_target")
    parser.add_argument("--drafter", type=Path, default=CHECKPOINTS / "text_drafter")
    parser.add_argument(
        "--target-shape", default="0.3B", help="what it is inflated to; 'as-is' for no inflation (0.3B)"
    )
    parser.add_argument("--drafter-shape", default="draft-0.05", help="the same for the drafter (draft-0.05)")
    parser.add_argument(
        "--prompts", type=Path, help="rendered prompts, one in a line, instead of the zoo's held-out ones"
    )
    parser.add_argument("--only", nargs="+", metavar="PEER", help=f"of {', '.join(one.name for one in CONTENDERS)}")
    parser.add_argument("--without-vllm", action="store_true", help="measure the others, write nothing")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="vLLM's environment, pairs and logs (.bench)")
    options = parser.parse_args(arguments)
    options.requests_per_slot = options.requests_per_slot or [
        QUICK_REQUESTS_PER_SLOT if options.quick else REQUESTS_PER_SLOT
    ]
    usual = 1 if options.quick else 2
    options.launches = usual if options.launches is None else options.launches
    options.repeats = [usual] if options.repeats is None else options.repeats
    options.max_new_tokens = options.max_new_tokens or (QUICK_NEW_TOKENS if options.quick else 64)
    for name in ("target_shape", "drafter_shape"):
        if getattr(options, name) == "as-is":
            setattr(options, name, None)
    if unknown := set(options.only or ()) - {one.name for one in CONTENDERS}:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    if min(*options.batches, *options.requests_per_slot, options.launches, *options.repeats) < 1:
        parser.error("batches, requests, launches and repeats are at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run; see the module's docstring."""
    options = parse(arguments)
    if options.tables:
        print(peers_table(json.loads(RESULTS.read_text())))
        return 0
    try:
        per_slot = by_batch("--requests-per-slot", options.batches, options.requests_per_slot)
        repeats = by_batch("--repeats", options.batches, options.repeats)
    except ValueError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    contenders = [
        one
        for one in CONTENDERS
        if not (options.without_vllm and one.is_vllm) and (options.only is None or one.name in options.only)
    ]
    try:
        counts = {batch: batch * number for batch, number in per_slot.items()}
        found = measure(options, contenders, counts, repeats)
    except (PeerError, EnvironmentRefused, CheckpointError, InflationError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(peers_table(found))
    if not options.quick and len(contenders) == len(CONTENDERS):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
