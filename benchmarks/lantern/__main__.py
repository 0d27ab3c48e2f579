"""Measures LANTERN on the zoo's image models: its premise, acceptance, image quality, and the paper's claims.

    python -m benchmarks.lantern    # runs what results/lantern.json lacks, writes after each row
    python -m benchmarks.tables     # the tables and the plot

Text- and class-conditional, at temperature 0 and 1, on a CPU. Lossless methods are compared with plain decoding code by
code; lossy ones are reported with their quality, its standard error, and its bounds.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness.engines import acceptance_of
from benchmarks.harness.results import command_line, progress, results_file
from benchmarks.lantern.quality import draw_neighbours, measure_quality, replace_codes, signal_to_noise
from benchmarks.lantern.recorder import record
from benchmarks.lantern.rows import (
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
from benchmarks.lantern.store import Store
from benchmarks.lantern.world import KINDS, Pictures, World, codes_of, load_world
from decoding import Completion
from decoding.contracts import Method
from models.llamagen.neighbours import Proximity, nearest_codes
from pipeline.sheets.contact_sheet import contact_sheet

RESULTS = results_file("lantern")
DOCS = Path("docs/results")
RECORDED = ("eagle2_rejection", "eagle2_coupled")
SHEETS = {PLAIN: "plain", "lantern_coupled_0.1": "lantern"}
"""Rows at temperature 1 with a contact sheet, and the last part of its file name."""
NUM_SHOWN, SHEET_COLUMNS, SIDE_PX = 16, 8, 96


class Bench:
    """The models and images of one kind of condition; results that several rows need are computed once."""

    def __init__(self, world: World, seed: int, store: Store) -> None:
        self.world = world
        self.seed = seed
        self.store = store
        self._plain: dict[tuple[float, bool], list[Completion]] = {}
        self._features: dict[str, NDArray[np.float64]] = {}
        self.tables: dict[str, Tensor] = {
            metric: nearest_codes(world.vq.codebook, world.share(KS[-1]), Proximity(metric)) for metric in METRICS
        }

    def count(self, temperature: float) -> int:
        """Return the number of images per row; greedy decoding draws one image per class."""
        shape = self.world.target.gpt.shape
        num = len(self.world.prompts)
        return min(num, shape.num_classes) if shape.condition == "class" and temperature == 0 else num

    def plain(self, temperature: float, other_seed: bool = False) -> list[Completion]:
        key = (temperature, other_seed)
        if key not in self._plain:
            requests = self.world.requests(temperature, self.seed + other_seed, self.count(temperature))
            self._plain[key] = self.world.decode(self.world.build(Row(PLAIN, "").method(self.world.share)), requests)
        return self._plain[key]

    def quality(self, images: Pictures, temperature: float) -> dict[str, Any]:
        """Return scores, and Fréchet distances to real and to plainly decoded images (of another seed above temperature
        0)."""
        name = f"plain/{temperature}"
        if "real" not in self._features:
            self._features["real"] = self.world.judge.features(self.world.reference)
        if name not in self._features:
            plain = self.world.paint(codes_of(self.plain(temperature, temperature > 0)))
            self._features[name] = self.world.judge.features(plain)
        scores = [prompt.score for prompt in self.world.prompts[: len(images)]]
        references = {"real": self._features["real"], "plain": self._features[name]}
        return measure_quality(self.world.judge, images, scores, references)

    def measure(self, section: str, key: str, what: str, make: Callable[[], dict[str, Any]], drafter: str = "") -> None:
        """Store the results entry that `make` returns, unless the store has it."""
        if self.store.has(section, key, drafter):
            return
        start = time.perf_counter()
        cell = make() | ({"drafter": drafter} if drafter else {})
        self.store.put(section, key, cell, cell.pop("samples"))
        figures = f"length {cell.get('mean_acceptance_length', 1.0):.2f}  distance {cell['frechet_real']:.3f}"
        progress(f"{self.world.kind} {what:55s} {time.perf_counter() - start:6.1f} s  {figures}")

    def run_row(self, row: Row, temperature: float, section: str = "rows", group: str = "") -> None:
        """Measure one row: acceptance, cost, equality, quality, and for some rows the acceptance under other settings.

        Written to `section` under `group` (the temperature by default) and the row's name.
        """
        drafter = ""
        if row.method(self.world.share).needs_checkpoint:
            if row.drafter not in self.world.drafters:
                progress(f"{self.world.kind} {row.label}: there is no drafter")
                return
            drafter = self.world.drafters[row.drafter][1]
        key = f"{group or format(temperature, 'g')}/{row.name}"
        make = partial(self._make_row, row, temperature, section)
        self.measure(section, key, f"{section} {key} {row.label}", make, drafter)

    def _make_row(self, row: Row, temperature: float, section: str) -> dict[str, Any]:
        world, choice = self.world, row.method(self.world.share)
        method, recorder = world.build(choice), None
        if section == "rows" and temperature > 0 and row.name in RECORDED:
            recorder = record(method.acceptance, self.tables, [world.share(k) for k in KS], DELTAS)
            method = Method(method.drafter, method.tree, recorder)
        if row.acceptance is None:
            done = self.plain(temperature, row.other_seed)
        else:
            done = world.decode(method, world.requests(temperature, self.seed, self.count(temperature)))
        plain = self.plain(temperature)
        quality = self.quality(world.paint(codes_of(done)), temperature)
        quality["samples"] |= {
            "num_steps": [completion.telemetry.num_spec_steps for completion in done],
            "num_accepted": [completion.telemetry.num_accepted_draft_tokens for completion in done],
            "equal": [a.token_ids == b.token_ids for a, b in zip(done, plain, strict=True)],
        }
        return {
            "label": row.label,
            "verify_mode": choice.verify_mode,
            "acceptance": choice.acceptance.kind,
            **measure_cost(done, plain),
            **quality,
            **({} if recorder is None else {"record": recorder.means()}),
        }

    def run_bounds(self) -> None:
        """Measure upper bounds of image quality: real images, and their reconstructions by the VQ model."""
        real, world = self.world.real, self.world

        def make(label: str, get_images: Callable[[], Pictures]) -> dict[str, Any]:
            return {"label": label, "num_images": len(real)} | self.quality(get_images(), 1.0)

        for name, label, get_images in (
            ("real", "real images", lambda: real),
            ("reconstructed", "real images through the VQ model", lambda: world.paint(world.encode(real))),
        ):
            self.measure("bounds", name, label, partial(make, label, get_images))

    def run_premise(self) -> None:
        """Measure quality after codes of real images and of plain syntheses are replaced by neighbours."""
        world = self.world
        sources: dict[str, Callable[[], NDArray[np.int32]]] = {
            "real": lambda: world.encode(world.real),
            "plain": lambda: codes_of(self.plain(1.0)),
        }

        def make(source: str, metric: str, k: int, drawn: bool) -> dict[str, Any]:
            codes, rank, table = sources[source](), world.share(k), self.tables[metric]
            if drawn:
                images = world.paint(draw_neighbours(codes, table, rank, self.seed))
            else:
                images = world.paint(replace_codes(codes, table, rank - 1))
            ratio = signal_to_noise(images, world.paint(codes))
            cell = {"source": source, "metric": metric, "k": k, "place": rank, "drawn": drawn, "snr_db": ratio}
            return cell | self.quality(images, 1.0)

        settings = [(f"{m}/{k}", m, k, False) for m in METRICS for k in (1, *KS) if m != "random" or k == KS[-1]]
        for source in sources:
            for name, metric, k, drawn in (*settings, (f"drawn/{KS[0]}", "l2", KS[0], True)):
                what = f"{source} codes by {name}"
                self.measure("premise", f"{source}/{name}", what, partial(make, source, metric, k, drawn))
        if not self.store.has("premise", "overlap"):
            pairs = zip(self.tables["l2"].tolist(), self.tables["cosine"].tolist(), strict=True)
            same = [len(set(a) & set(b)) / len(a) for a, b in pairs]
            self.store.put("premise", "overlap", {"l2_cosine": sum(same) / len(same)})


def measure_cost(done: Sequence[Completion], plain: Sequence[Completion]) -> dict[str, Any]:
    """Return acceptance and forwards per image; drafter forwards are those of the whole batch."""
    return {
        "num_images": len(done),
        "num_codes": sum(len(completion.token_ids) for completion in done),
        **acceptance_of(done),
        "target_forwards_per_image": sum(completion.telemetry.target_forwards for completion in done) / len(done),
        "drafter_forwards_per_image": sum(completion.telemetry.drafter_forwards for completion in done) / len(done),
        "equal_share": sum(a.token_ids == b.token_ids for a, b in zip(done, plain, strict=True)) / len(done),
    }


def settings_of(world: World, seed: int) -> dict[str, Any]:
    """Return the settings of a kind of condition; stored results with other settings are dropped."""
    return {
        "seed": seed,
        "num_images": len(world.prompts),
        "num_reference": len(world.reference),
        "codebook_size": world.target.vocab_size,
        "grid": world.target.gpt.shape.grid,
        "guidance_scale": world.sampling.guidance_scale,
        "top_k": world.sampling.top_k,
        "k": {str(k): world.share(k) for k in KS},
        "tree": TREE,
        "static_tree": STATIC_TREE,
        "revisions": world.revisions,
    }


def run_kind(world: World, seed: int, store: Store) -> None:
    """Run everything of one kind of condition that the store lacks."""
    store.open(settings_of(world, seed))
    bench = Bench(world, seed, store)
    bench.run_bounds()
    for temperature, row in rows_of(world.kind):
        bench.run_row(row, temperature)
    if world.kind == "text":
        # The class-conditional model has the same codebook.
        bench.run_premise()
        run_guidance(world, seed, store)
    facts = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "convention": "acceptance lengths include the bonus token",
    }
    store.change(lambda data: data.update(facts))


def run_guidance(world: World, seed: int, store: Store) -> None:
    """Run `GUIDED_ROWS` at every guidance scale; at the default scale they are copied from the other rows."""
    for scale in GUIDANCE:
        if scale == world.sampling.guidance_scale:
            known = store.read()["kinds"][world.kind]["rows"]
            for name in GUIDED_ROWS:
                if f"1/{name}" in known:
                    store.put("guidance", f"{scale:g}/{name}", known[f"1/{name}"])  # its samples are in `rows`
            continue
        bench = Bench(replace(world, sampling=replace(world.sampling, guidance_scale=scale)), seed, store)
        for name in GUIDED_ROWS:
            bench.run_row(row_named(name), 1.0, "guidance", f"{scale:g}")


def draw_sheets(world: World, seed: int, folder: Path = DOCS) -> list[Path]:
    """Write a contact sheet `images_<kind>_<row>.png` with the first images of every row in `SHEETS`."""
    files = []
    for name, last in SHEETS.items():
        row = row_named(name)
        done = world.decode(world.build(row.method(world.share)), world.requests(1.0, seed, NUM_SHOWN))
        title = row.label.replace("δ", "delta")  # the font has no Greek
        captions = [prompt.prompt for prompt in world.prompts[:NUM_SHOWN]]
        files.append(folder / f"images_{world.kind}_{last}.png")
        files[-1].write_bytes(contact_sheet(world.paint(codes_of(done)), captions, SHEET_COLUMNS, SIDE_PX, title))
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("lantern", __doc__)
    parser.add_argument("--images", type=int, default=32, help="images of each row (32; class-conditional 48)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for kind in KINDS:
        world = load_world(kind, options.images, options.seed)
        run_kind(world, options.seed, Store(RESULTS, kind))
        if "eagle" in world.drafters:
            draw_sheets(world, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
