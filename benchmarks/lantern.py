"""LANTERN on the zoo's image models: its premise, what it accepts, what that costs in quality, and the paper's claims.

    python -m benchmarks.lantern                  # runs what results/lantern.json lacks, writes it cell by cell
    python -m benchmarks.lantern --quick          # a minute, printed only
    python -m benchmarks.lantern --only class     # one kind of condition; two commands side by side share the file
    python -m benchmarks.lantern --sheets         # only the contact sheets again
    python -m benchmarks.tables                   # the tables in README.md and docs/results/lantern.md, and the plot

Text- and class-conditional, at temperature 0 and 1, offline, on a CPU. Lossless methods are compared with plain
decoding code by code; lossy ones are reported with their quality, and that with its standard error, floor and ceiling.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.lantern_claims import check_claims
from benchmarks.lantern_quality import draw_neighbours, measure_quality, replace_codes, signal_to_noise
from benchmarks.lantern_recorder import record
from benchmarks.lantern_rows import (
    DELTAS,
    GUIDANCE,
    GUIDED_ROWS,
    KS,
    METRICS,
    PLAIN,
    STATIC_TREE,
    TREE,
    Row,
    row_named,
    rows_of,
)
from benchmarks.lantern_sheets import draw_sheets
from benchmarks.lantern_store import Store
from benchmarks.lantern_world import DRAFTERS, KINDS, World, codes_of, load_world, missing_checkpoints
from decoding import Completion
from decoding.contracts import Method
from models.llamagen.neighbours import Proximity, nearest_codes

RESULTS = Path(__file__).parent / "results" / "lantern.json"
RECORDED = ("eagle2_rejection", "eagle2_coupled")
QUICK_IMAGES = 8
QUICK_ROWS = (PLAIN, "eagle2_rejection", "eagle2_coupled", "lantern_coupled_0.4")


class Bench:
    """One world under measurement; what several cells need is made once, when the first of them is."""

    def __init__(self, world: World, seed: int, store: Store) -> None:
        self.world = world
        self.seed = seed
        self.store = store
        self._plain: dict[tuple[float, bool], list[Completion]] = {}
        self._features: dict[str, NDArray[np.float64]] = {}
        self.tables: dict[str, Tensor] = {
            metric: nearest_codes(world.vq.codebook, world.share(KS[-1]), Proximity(metric)) for metric in METRICS
        }

    # --- what all cells share --------------------------------------------------------------------------------------

    def count(self, temperature: float) -> int:
        """Images of a row: greedy decoding has nothing to add to one image of a class."""
        shape = self.world.target.gpt.shape
        asked = len(self.world.asked)
        return min(asked, shape.num_classes) if shape.condition == "class" and temperature == 0 else asked

    def plain(self, temperature: float, other_seed: bool = False) -> list[Completion]:
        key = (temperature, other_seed)
        if key not in self._plain:
            requests = self.world.requests(temperature, self.seed + other_seed, self.count(temperature))
            self._plain[key] = self.world.decode(self.world.build(Row(PLAIN, "").method(self.world.share)), requests)
        return self._plain[key]

    def references(self, temperature: float) -> dict[str, NDArray[np.float64]]:
        """Features that distances are taken to: real images, and plain ones (of another seed, where seeds matter)."""
        name = f"plain/{temperature}"
        if "real" not in self._features:
            self._features["real"] = self.world.judge.features(self.world.reference)
        if name not in self._features:
            images = self.world.paint(codes_of(self.plain(temperature, temperature > 0)))
            self._features[name] = self.world.judge.features(images)
        return {"real": self._features["real"], "plain": self._features[name]}

    def quality(self, images: Sequence[NDArray[np.uint8]], temperature: float) -> dict[str, Any]:
        scores = [asked.score for asked in self.world.asked[: len(images)]]
        return measure_quality(self.world.judge, images, scores, self.references(temperature))

    # --- cells -----------------------------------------------------------------------------------------------------

    def run_row(self, row: Row, temperature: float, section: str = "rows", group: str = "") -> None:
        """One line: acceptance, cost, equality, quality, and for some what other settings would have accepted.

        Written to `section` under `group` (the temperature, unless another is given) and the row's name.
        """
        key, world = f"{group or format(temperature, 'g')}/{row.name}", self.world
        drafter = "" if row.acceptance is None else world.revision(row.drafter)
        if drafter is None:
            print(f"{world.kind} {row.label}: there is no drafter", file=sys.stderr)
            return
        if self.store.has(section, key, drafter):
            return
        start = time.perf_counter()
        choice = row.method(world.share)
        method, recorder = world.build(choice), None
        if section == "rows" and temperature > 0 and row.name in RECORDED:
            recorder = record(method.acceptance, self.tables, [world.share(k) for k in KS], DELTAS)
            method = Method(method.drafter, method.tree, recorder)
        if row.acceptance is None:
            done = self.plain(temperature, row.other_seed)
        else:
            done = world.decode(method, world.requests(temperature, self.seed, self.count(temperature)))
        cell: dict[str, Any] = {
            "label": row.label,
            "verify_mode": choice.verify_mode,
            "acceptance": choice.acceptance.kind,
        }
        cell |= measure_cost(done, self.plain(temperature))
        cell |= self.quality(world.paint(codes_of(done)), temperature)
        if drafter:
            cell["drafter"] = drafter
        if recorder is not None:
            cell["record"] = recorder.means()
        self.store.put(section, key, cell)
        scale = f" guidance {world.sampling.guidance_scale:g}" if section == "guidance" else ""
        tell(f"{world.kind} T = {temperature:g}{scale} {row.label}", start, cell)

    def run_bounds(self) -> None:
        """The ceilings: real images, and what the VQ model makes of them."""
        for name, label in (("real", "real images"), ("reconstructed", "real images through the VQ model")):
            if self.store.has("bounds", name):
                continue
            start = time.perf_counter()
            images = self.world.real
            if name == "reconstructed":
                images = self.world.paint(self.world.encode(images))
            cell = {"label": label, "num_images": len(images)} | self.quality(images, 1.0)
            self.store.put("bounds", name, cell)
            tell(f"{self.world.kind} {label}", start, cell)

    def run_premise(self) -> None:
        """Codes of real images and of plain syntheses, replaced by neighbours at a given place."""
        world = self.world
        sources: dict[str, Callable[[], NDArray[np.int32]]] = {
            "real": lambda: world.encode(world.real),
            "plain": lambda: codes_of(self.plain(1.0)),
        }
        for source, codes_of_source in sources.items():
            for metric, k in ((m, k) for m in METRICS for k in (1, *KS) if m != "random" or k == KS[-1]):
                self._replace(source, codes_of_source, f"{metric}/{k}", metric, k, drawn=False)
            self._replace(source, codes_of_source, f"drawn/{KS[0]}", "l2", KS[0], drawn=True)
        if not self.store.has("premise", "overlap"):
            near, other = self.tables["l2"], self.tables["cosine"]
            same = [len(set(a) & set(b)) / len(a) for a, b in zip(near.tolist(), other.tolist(), strict=True)]
            self.store.put("premise", "overlap", {"l2_cosine": sum(same) / len(same)})

    def _replace(
        self, source: str, codes_of_source: Callable[[], NDArray[np.int32]], name: str, metric: str, k: int, drawn: bool
    ) -> None:
        key = f"{source}/{name}"
        if self.store.has("premise", key):
            return
        start = time.perf_counter()
        codes, place = codes_of_source(), self.world.share(k)
        if drawn:
            replaced = draw_neighbours(codes, self.tables[metric], place, self.seed)
        else:
            replaced = replace_codes(codes, self.tables[metric], place - 1)
        images = self.world.paint(replaced)
        ratio = signal_to_noise(images, self.world.paint(codes))
        cell = {"source": source, "metric": metric, "k": k, "place": place, "drawn": drawn, "snr_db": ratio}
        cell |= self.quality(images, 1.0)
        self.store.put("premise", key, cell)
        tell(f"{self.world.kind} {source} codes by {name}", start, cell)


def measure_cost(done: Sequence[Completion], plain: Sequence[Completion]) -> dict[str, Any]:
    """Acceptance and forwards of a row. The acceptance length counts the bonus token; it is total over total, and its
    standard error is that of a ratio over images. Forwards are of an image, with the whole batch's for a drafter."""
    told = [completion.telemetry for completion in done]
    steps = np.array([t.num_spec_steps for t in told], dtype=np.float64)
    accepted = np.array([t.num_accepted_draft_tokens for t in told], dtype=np.float64)
    ratio = accepted.sum() / max(1.0, steps.sum())
    return {
        "num_images": len(done),
        "num_codes": sum(len(completion.token_ids) for completion in done),
        "mean_acceptance_length": 1.0 + float(ratio),
        "acceptance_length_se": float(np.sqrt(((accepted - ratio * steps) ** 2).sum()) / max(1.0, steps.sum())),
        "drafted_per_step": sum(t.num_draft_tokens for t in told) / max(1.0, float(steps.sum())),
        "target_forwards_per_image": sum(t.target_forwards for t in told) / len(told),
        "drafter_forwards_per_image": sum(t.drafter_forwards for t in told) / len(told),
        "relaxed_share": sum(t.num_relaxed_accepts for t in told) / max(1.0, float(accepted.sum())),
        "equal_share": sum(a.token_ids == b.token_ids for a, b in zip(done, plain, strict=True)) / len(done),
    }


def tell(what: str, start: float, cell: dict[str, Any]) -> None:
    """One line of progress."""
    length = f"length {cell['mean_acceptance_length']:.2f}  " if "mean_acceptance_length" in cell else ""
    print(
        f"{what:60s} {time.perf_counter() - start:6.1f} s  {length}as asked {cell['whole']:.2f}  "
        f"distance {cell['frechet_real']:.3f}",
        file=sys.stderr,
        flush=True,
    )


def settings_of(world: World, seed: int) -> dict[str, Any]:
    """What decides a kind's cells; others are dropped when it changes."""
    return {
        "seed": seed,
        "num_images": len(world.asked),
        "num_reference": len(world.reference),
        "codebook_size": world.target.vocab_size,
        "grid": world.target.gpt.shape.grid,
        "guidance_scale": world.sampling.guidance_scale,
        "top_k": world.sampling.top_k,
        "k": {str(k): world.share(k) for k in KS},
        "tree": dict(TREE),
        "static_tree": dict(STATIC_TREE),
        "revisions": world.revisions,
    }


def run_kind(world: World, seed: int, store: Store, only: Sequence[str] = ()) -> None:
    """Everything that the store lacks of one kind, what matters most first; `only` names rows at temperature 1."""
    store.open(settings_of(world, seed))
    bench = Bench(world, seed, store)
    if not only:
        bench.run_bounds()
    for temperature, row in rows_of(world.kind):
        if not only or (temperature > 0 and row.name in only):
            bench.run_row(row, temperature)
    if not only and world.kind == "text":
        # The classes' model draws from the same codebook.
        bench.run_premise()
        run_guidance(world, seed, store)
    store.change(lambda data: data.update(conclude(data)))


def run_guidance(world: World, seed: int, store: Store) -> None:
    """Some rows at every scale of guidance, each with plain decoding at that scale beside it; those at the scale of all
    other rows are theirs."""
    for scale in GUIDANCE:
        if scale == world.sampling.guidance_scale:
            known = store.read()["kinds"][world.kind]["rows"]
            for name in GUIDED_ROWS:
                if f"1/{name}" in known:
                    store.put("guidance", f"{scale:g}/{name}", known[f"1/{name}"])
            continue
        bench = Bench(replace(world, sampling=replace(world.sampling, guidance_scale=scale)), seed, store)
        for name in GUIDED_ROWS:
            bench.run_row(row_named(name), 1.0, "guidance", f"{scale:g}")


def conclude(results: dict[str, Any]) -> dict[str, Any]:
    """What follows from all cells, and what they were made with."""
    return {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "convention": "acceptance lengths include the bonus token",
        "claims": check_claims(results["kinds"]),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run or draw; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lantern", description=__doc__)
    parser.add_argument(
        "--images", type=int, default=32, help="images of each row (32; of classes as many more as make all equal, 48)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="torch threads (torch's own choice)")
    parser.add_argument("--only", choices=KINDS, help="one kind of condition")
    parser.add_argument("--quick", action="store_true", help="a few images of some rows, printed and not written")
    parser.add_argument("--sheets", action="store_true", help="only draw the contact sheets")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    kinds = [options.only] if options.only else list(KINDS)
    if lost := [name for kind in kinds for name in missing_checkpoints(kind) if name != DRAFTERS[kind]]:
        print(f"zoo/checkpoints lacks {', '.join(lost)}", file=sys.stderr)
        return 1
    for kind in kinds:
        world = load_world(kind, QUICK_IMAGES if options.quick else options.images, options.seed)
        if options.quick:
            run_kind(replace(world, asked=world.asked[:QUICK_IMAGES]), options.seed, Store(None, kind), QUICK_ROWS)
            continue
        if not options.sheets:
            run_kind(world, options.seed, Store(RESULTS, kind))
        if world.drafter is not None:
            draw_sheets(world, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
