"""Renders tables and the plot of the image benchmark, beside the paper's numbers; missing results are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness.claims import Holds, claims_table
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.harness.plots import trade_off
from benchmarks.lantern.claims import reaches
from benchmarks.lantern.recorder import Setting, pick
from benchmarks.lantern.rows import DELTAS, GUIDANCE, GUIDED_ROWS, KS, MAIN
from decoding.acceptance.neighbourhood import Divergence

Paper = dict[int, tuple[float, ...]]
# Table 2: acceptance probabilities of the first draft, LlamaGen XL stage 1, by k and δ.
PAPER_PROBABILITY: Paper = {
    100: (0.0725, 0.1096, 0.1703, 0.2595),
    300: (0.0759, 0.1166, 0.1892, 0.3267),
    1000: (0.0786, 0.1186, 0.2000, 0.3657),
}
PAPER_STRICT = 0.0402
# Table 4: mean accepted length and FID.
PAPER_ABLATION = {
    "metric_l2": (2.09, 17.43),
    "metric_l2_0.05": (1.50, 15.71),
    "metric_cosine": (2.09, 17.46),
    "metric_random": (1.26, 15.62),
    "divergence_jsd": (2.29, 18.21),
    "lantern_paper_0.4": (2.40, 18.76),
}
# Table 1, greedy, LlamaGen-3B, with Vicuna-7B's lengths on text in brackets.
PAPER_NAIVE = {"sd": "1.40 (2.36)", "medusa": "1.38 (2.52)", "eagle2": "2.11 (4.98)"}
OTHERS: tuple[tuple[str, Divergence, str], ...] = (
    ("cosine", "tvd", "cosine"),
    ("random", "tvd", "random"),
    ("l2", "jsd", "JSD"),
)
"""Metric, divergence and label of the rows at the largest k only."""
QUALITY = "as asked | attributes | distance to real | distance to plain"


def _quality(cell: Results) -> list[str]:
    digits = {"whole": 3, "attributes": 3, "frechet_real": 1, "frechet_plain": 1}
    shown = [f"{cell[name]:.{n}f} ± {cell[f'{name}_se']:.{n}f}" for name, n in digits.items()]
    # Plainly decoded images have no distance to themselves.
    return shown if cell["frechet_plain"] > 1e-6 else [*shown[:-1], "–"]


def _length(cell: Results) -> str:
    return f"{cell['mean_acceptance_length']:.2f} ± {cell['acceptance_length_se']:.2f}"


def _equal(cell: Results) -> str:
    return percent(cell["equal_share"]) if cell["acceptance"] == "exact" else "–"


def rows_table(results: Results, kind: str) -> str:
    """Render every method at each temperature, then the bounds of the quality."""
    data = results["kinds"][kind]
    lines: list[list[object]] = []
    for temperature, rows in MAIN.items():
        for row in rows:
            cell = data["rows"].get(f"{temperature:g}/{row.name}")
            if cell is not None:
                relaxed = percent(cell["relaxed_share"]) if cell["verify_mode"] == "lossy" else "–"
                target, drafter = cell["target_forwards_per_image"], cell["drafter_forwards_per_image"]
                cost = [_length(cell), f"{target:.1f}", f"{drafter:.0f}", relaxed, _equal(cell)]
                lines.append([cell["label"], f"{temperature:g}", *cost, *_quality(cell)])
    lines += [[f"*{cell['label']}*", *[""] * 6, *_quality(cell)] for cell in data["bounds"].values()]
    columns = "method | T | acceptance length | target forwards | drafter forwards | relaxed | equal"
    return table(f"{columns} | {QUALITY}", lines)


def settings_table(results: Results) -> str:
    lines = []
    for kind, data in results["kinds"].items():
        one = data["settings"]
        size = (one["num_images"], one["guidance_scale"], one["top_k"] or "off", one["codebook_size"])
        lines.append([kind, *size, one["tree"]["total_tokens"], one["num_reference"]])
    return table("condition | images of a row | guidance scale | top-k | codes | nodes of a tree | real images", lines)


def flatness_table(results: Results) -> str:
    """Render how flat the targets' distributions are, and how well their drafters guess."""
    names = ("top1_guided", "top10_guided", "top1_filtered", "top10_filtered", "strict_probability")
    lines = [
        [kind, *(f"{cell['record'][name]:.3f}" for name in (*names, "guessed_in_top1", "guessed_in_top3"))]
        for kind, cell in _cells(results, "1/eagle2_rejection")
    ]
    return table(
        "condition | top-1 mass | top-10 mass | after top-k: top-1 | top-10 | a strict test takes the first draft "
        "| drafter's first guess is the target's best | one of its first three",
        lines,
    )


def _cells(results: Results, key: str) -> Iterator[tuple[str, Results]]:
    """Yield (kind, results) of a row for every kind of condition that has it."""
    return ((kind, data["rows"][key]) for kind, data in results["kinds"].items() if key in data["rows"])


def premise_table(results: Results) -> str:
    """Render the quality of images after their codes are replaced."""
    data = results["kinds"]["text"]
    lines = []
    for source, label, before in (
        ("real", "real images", data["bounds"]["reconstructed"]),
        ("plain", "plain decoding", data["rows"]["1/plain"]),
    ):
        lines.append([label, "nothing", "", *_quality(before)])
        for key, cell in data["premise"].items():
            if key.startswith(f"{source}/"):
                what = f"neighbour {cell['place']} by {cell['metric'].replace('l2', 'ℓ2')}"
                if cell["metric"] == "random":
                    what = "a code drawn at random"
                if cell["drawn"]:
                    what = f"one of the {cell['place']} nearest by ℓ2, drawn at each place"
                lines.append([label, what, f"{cell['snr_db']:.1f}", *_quality(cell)])
    return table(f"codes of | replaced by | PSNR against unreplaced, dB | {QUALITY}", lines)


def grid_table(results: Results, row: str, what: str, paper: Paper | None) -> str:
    """Render the first draft's acceptance over k × δ, the paper's numbers in brackets: `what` is "probability", or
    "hit" for the share of steps with a hit under shared noise."""
    lines = []
    for kind, cell in _cells(results, f"1/{row}"):
        record, share = cell["record"], results["kinds"][kind]["settings"]["k"]
        printed = paper if kind == "text" else None
        strict = f"{record[f'strict_{what}']:.3f}" + (f" ({PAPER_STRICT:.3f})" if printed else "")
        lines.append([kind, "1 (strict)", *[strict] * len(DELTAS)])
        grid: list[tuple[int, str, Divergence, str]] = [(k, "l2", "tvd", str(share[str(k)])) for k in KS]
        grid += [(KS[-1], metric, divergence, f"{share[str(KS[-1])]}, {label}") for metric, divergence, label in OTHERS]
        for k, metric, divergence, label in grid:
            settings = (Setting(metric, divergence, share[str(k)], delta) for delta in DELTAS)
            means = [f"{pick(record, what, setting):.3f}" for setting in settings]
            if printed and label == str(share[str(k)]):
                means = [f"{mean} ({value:.3f})" for mean, value in zip(means, printed[k], strict=True)]
            lines.append([kind, label, *means])
    return table(["condition", "k", *(f"δ = {delta}" for delta in DELTAS)], lines)


def ablation_table(results: Results) -> str:
    """Render the paper's Table 4."""
    rows, lines = results["kinds"]["text"]["rows"], []
    for name, (length, distance) in PAPER_ABLATION.items():
        if cell := rows.get(f"1/{name}"):
            label = "TVD, δ = 0.4" if name == "lantern_paper_0.4" else cell["label"]
            lines.append([label, _length(cell), f"{length:.2f}", *_quality(cell), f"{distance:.2f}"])
    return table(f"setting | acceptance length | the paper's | {QUALITY} | the paper's FID", lines)


def _points(results: Results) -> dict[tuple[int, float], Results]:
    """Return (k, δ) → results of the trade-off, in order of k and δ."""
    rows = results["kinds"]["text"]["rows"]
    return {
        (k, delta): rows[f"1/{name}"]
        for k in KS
        for delta in DELTAS
        for name in (f"sweep_{k}_{delta}", f"lantern_coupled_{delta}" if k == KS[-1] else "")
        if f"1/{name}" in rows
    }


def sweep_table(results: Results) -> str:
    """Render the points of the trade-off (Figure 5)."""
    share = results["kinds"]["text"]["settings"]["k"]
    lines = [[share[str(k)], delta, _length(one), *_quality(one)] for (k, delta), one in _points(results).items()]
    return table(f"k | δ | acceptance length | {QUALITY}", lines)


def naive_table(results: Results) -> str:
    """Render the paper's Table 1: acceptance of images by drafting methods for text, greedy."""
    rows = results["kinds"]["text"]["rows"]
    lines = [
        [cell["label"], _length(cell), printed, f"{cell['drafted_per_step']:.1f}", _equal(cell)]
        for name, printed in PAPER_NAIVE.items()
        if (cell := rows.get(f"0/{name}"))
    ]
    return table("method | acceptance length | the paper's (on text) | drafted per step | equal", lines)


def guidance_table(results: Results) -> str:
    """Render acceptance length and quality over guidance scales, at temperature 1."""
    cells = results["kinds"]["text"]["guidance"]
    lines = [
        [f"{scale:g}", cell["label"], _length(cell), _equal(cell), *_quality(cell)]
        for scale in GUIDANCE
        for name in GUIDED_ROWS
        if (cell := cells.get(f"{scale:g}/{name}"))
    ]
    return table(f"guidance | method | acceptance length | equal | {QUALITY}", lines)


def guidance_line(results: Results) -> str:
    """Return a sentence on the guidance at which lossless methods accept more than LANTERN at δ = 0.4."""
    cells = results["kinds"]["text"]["guidance"]
    parts = [
        f"{title} {_beside_lantern(cells, name)}"
        for name, title in (
            ("jacobi", "Speculative Jacobi decoding, without a drafter,"),
            ("eagle2_coupled", "EAGLE-2"),
        )
        if any(key.endswith(f"/{name}") for key in cells)
    ]
    return (
        "Noise shared by drafts and target loses nothing. Beside LANTERN with the paper's residual at δ = 0.4, which "
        f"is lossy (codes per step of the target): {'. '.join(parts)}."
    )


def _beside_lantern(cells: Results, name: str) -> str:
    found: dict[Holds, list[str]] = {True: [], False: [], None: []}
    for scale in GUIDANCE:
        if f"{scale:g}/lantern_paper_0.4" in cells and f"{scale:g}/{name}" in cells:
            holds, exact, relaxed = reaches(cells, scale, lossless=name)
            found[holds].append(f"{scale:g} ({exact:.2f} against {relaxed:.2f})")
    words = {True: "accepts more at guidance", False: "accepts less at", None: "is not told apart at"}
    return "; ".join(f"{words[holds]} {', '.join(scales)}" for holds, scales in found.items() if scales)


TABLES: dict[str, Callable[[Results], str]] = {
    "lantern_settings": settings_table,
    "lantern_rows": partial(rows_table, kind="text"),
    "lantern_class_rows": partial(rows_table, kind="class"),
    "lantern_flatness": flatness_table,
    "lantern_premise": premise_table,
    "lantern_probability": partial(grid_table, row="eagle2_rejection", what="probability", paper=PAPER_PROBABILITY),
    "lantern_hits": partial(grid_table, row="eagle2_coupled", what="hit", paper=None),
    "lantern_sweep": sweep_table,
    "lantern_ablation": ablation_table,
    "lantern_claims": claims_table,
    "lantern_naive": naive_table,
    "lantern_guidance": guidance_table,
}
LINES: dict[str, Callable[[Results], str]] = {"lantern_guidance_line": guidance_line}


def draw_trade_off(results: Results) -> str:
    """Plot acceptance length against Fréchet distance, for k and δ under coupled noise, and other rules."""
    rows, share = results["kinds"]["text"]["rows"], results["kinds"]["text"]["settings"]["k"]
    groups = {
        f"k = {share[str(k)]}, δ rising": [cell for (other, _), cell in _points(results).items() if other == k]
        for k in KS
    }
    for label, names in (
        ("the paper's residual", ("lantern_paper_0.1", "metric_l2", "lantern_paper_0.4")),
        ("EAGLE-2", ("eagle2_rejection", "eagle2_coupled")),
    ):
        groups[label] = [rows[f"1/{name}"] for name in names if f"1/{name}" in rows]
    lines = {
        label: [(cell["mean_acceptance_length"], cell["frechet_real"]) for cell in cells]
        for label, cells in groups.items()
        if cells
    }
    return trade_off(lines, "mean acceptance length", "distance to real images")
