"""Tables and the plot made from the committed results of the image benchmark.

Knows what cells hold and how the paper's tables look. The paper's numbers stand beside ours where it printed them.
Cells that were not run yet are left out.
"""

from __future__ import annotations

from typing import Any

from benchmarks import deciding
from benchmarks.deciding import Holds
from benchmarks.lantern_claims import reaches
from benchmarks.lantern_recorder import Setting, pick
from benchmarks.lantern_rows import DELTAS, GUIDANCE, GUIDED_ROWS, KS, MAIN
from benchmarks.plots import trade_off
from decoding.acceptance.neighbourhood import Divergence

Results = dict[str, Any]
# Table 2: acceptance probabilities of the first draft, LlamaGen XL stage 1, by k and δ; EAGLE-2 has 0.0402.
PAPER_PROBABILITY: dict[int, tuple[float, ...]] = {
    100: (0.0725, 0.1096, 0.1703, 0.2595),
    300: (0.0759, 0.1166, 0.1892, 0.3267),
    1000: (0.0786, 0.1186, 0.2000, 0.3657),
}
PAPER_STRICT = 0.0402
OTHERS: tuple[tuple[str, Divergence], ...] = (("cosine", "tvd"), ("random", "tvd"), ("l2", "jsd"))
QUALITY_HEAD = ("as asked", "attributes", "distance to real", "distance to plain")


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(rows + ["| " + " | ".join(line) + " |" for line in lines])


def _with_error(cell: dict[str, Any], name: str, digits: int = 3) -> str:
    return f"{cell[name]:.{digits}f} ± {cell[f'{name}_se']:.{digits}f}"


def _quality(cell: dict[str, Any]) -> list[str]:
    names = ("whole", "attributes", "frechet_real", "frechet_plain")
    shown = [_with_error(cell, name, 1 if name.startswith("frechet") else 3) for name in names]
    # The images that distances are taken to have none to themselves.
    return shown if cell["frechet_plain"] > 1e-6 else [*shown[:-1], "–"]


def _cost(cell: dict[str, Any]) -> list[str]:
    equal = f"{100 * cell['equal_share']:.0f} %" if cell["acceptance"] == "exact" else "–"
    return [
        f"{cell['mean_acceptance_length']:.2f} ± {cell['acceptance_length_se']:.2f}",
        f"{cell['target_forwards_per_image']:.1f}",
        f"{cell['drafter_forwards_per_image']:.0f}",
        f"{100 * cell['relaxed_share']:.0f} %" if cell["verify_mode"] == "lossy" else "–",
        equal,
    ]


def rows_table(results: Results) -> str:
    """Every method at each temperature, text-conditional; what bounds the quality stands below them."""
    return _rows_of(results, "text")


def class_rows_table(results: Results) -> str:
    """The same, class-conditional."""
    return _rows_of(results, "class")


def _rows_of(results: Results, kind: str) -> str:
    data = results["kinds"][kind]
    head = [
        "method",
        "T",
        "acceptance length",
        "target forwards",
        "drafter forwards",
        "relaxed",
        "equal",
        *QUALITY_HEAD,
    ]
    lines = []
    for temperature, rows in MAIN.items():
        for row in rows:
            cell = data["rows"].get(f"{temperature:g}/{row.name}")
            if cell is not None:
                lines.append([cell["label"], f"{temperature:g}", *_cost(cell), *_quality(cell)])
    for cell in data["bounds"].values():
        lines.append([f"*{cell['label']}*", "", "", "", "", "", "", *_quality(cell)])
    return _table(head, lines)


def settings_table(results: Results) -> str:
    """What all rows were run with."""
    head = ["condition", "images of a row", "guidance scale", "top-k", "codes", "nodes of a tree", "real images"]
    lines = []
    for kind, data in results["kinds"].items():
        own = data["settings"]
        top_k = str(own["top_k"]) if own["top_k"] else "off"
        cells = [kind, own["num_images"], own["guidance_scale"], top_k, own["codebook_size"]]
        lines.append([str(cell) for cell in (*cells, own["tree"]["total_tokens"], own["num_reference"])])
    return _table(head, lines)


def flatness_table(results: Results) -> str:
    """How flat the targets' distributions are, and how well their drafters guess."""
    head = [
        "condition",
        "top-1 mass",
        "top-10 mass",
        "after top-k: top-1",
        "top-10",
        "a strict test takes the first draft",
        "drafter's first guess is the target's best",
        "one of its first three",
    ]
    lines = []
    for kind, data in results["kinds"].items():
        if "1/eagle2_rejection" not in data["rows"]:
            continue
        told = data["rows"]["1/eagle2_rejection"]["record"]
        names = ("top1_guided", "top10_guided", "top1_filtered", "top10_filtered", "strict_probability")
        lines.append([kind, *(f"{told[name]:.3f}" for name in (*names, "guessed_in_top1", "guessed_in_top3"))])
    return _table(head, lines)


def premise_table(results: Results) -> str:
    """What is left of an image whose codes are replaced."""
    data = results["kinds"]["text"]
    head = ["codes of", "replaced by", "PSNR against unreplaced, dB", *QUALITY_HEAD]
    first = {
        "real": ("real images", data["bounds"]["reconstructed"]),
        "plain": ("plain decoding", data["rows"]["1/plain"]),
    }
    lines = []
    for source, (label, before) in first.items():
        lines.append([label, "nothing", "", *_quality(before)])
        for key, cell in data["premise"].items():
            if not key.startswith(f"{source}/"):
                continue
            share = f"{cell['place']}"
            what = f"neighbour {share} by {cell['metric'].replace('l2', 'ℓ2')}"
            if cell["metric"] == "random":
                what = "a code drawn at random"
            if cell["drawn"]:
                what = f"one of the {share} nearest by ℓ2, drawn at each place"
            lines.append([label, what, f"{cell['snr_db']:.1f}", *_quality(cell)])
    return _table(head, lines)


def probability_table(results: Results) -> str:
    """Acceptance probability of the first draft over k × δ, the paper's (Table 2) in brackets."""
    return _grid(results, "eagle2_rejection", "probability", PAPER_PROBABILITY)


def hits_table(results: Results) -> str:
    """The share of steps whose first draft is taken when drafter and target share their noise."""
    return _grid(results, "eagle2_coupled", "hit", None)


def _grid(results: Results, row: str, what: str, paper: dict[int, tuple[float, ...]] | None) -> str:
    lines = []
    for kind, data in results["kinds"].items():
        if f"1/{row}" not in data["rows"]:
            continue
        record, share = data["rows"][f"1/{row}"]["record"], data["settings"]["k"]
        printed = paper if kind == "text" else None
        strict = record["strict_probability" if what == "probability" else "strict_hit"]
        lines.append(
            [kind, "1 (strict)", *[f"{strict:.3f}" + (f" ({PAPER_STRICT:.3f})" if printed else "")] * len(DELTAS)]
        )
        for k in KS:
            own = [pick(record, what, Setting("l2", "tvd", share[str(k)], delta)) for delta in DELTAS]
            beside = [f" ({value:.3f})" for value in printed[k]] if printed else [""] * len(DELTAS)
            lines.append([kind, f"{share[str(k)]}", *(f"{a:.3f}{b}" for a, b in zip(own, beside, strict=True))])
        for metric, divergence in OTHERS:
            label = "JSD" if divergence == "jsd" else metric
            own = [pick(record, what, Setting(metric, divergence, share[str(KS[-1])], delta)) for delta in DELTAS]
            lines.append([kind, f"{share[str(KS[-1])]}, {label}", *(f"{value:.3f}" for value in own)])
    return _table(["condition", "k", *(f"δ = {delta}" for delta in DELTAS)], lines)


ABLATION = (
    "metric_l2",
    "metric_l2_0.05",
    "metric_cosine",
    "metric_random",
    "divergence_jsd",
    "lantern_paper_0.4",
)
# Table 4: mean accepted length and FID, in the order above.
PAPER_ABLATION = ((2.09, 17.43), (1.50, 15.71), (2.09, 17.46), (1.26, 15.62), (2.29, 18.21), (2.40, 18.76))


def ablation_table(results: Results) -> str:
    """The paper's Table 4."""
    rows = results["kinds"]["text"]["rows"]
    lines = []
    for name, (length, distance) in zip(ABLATION, PAPER_ABLATION, strict=True):
        cell = rows.get(f"1/{name}")
        if cell is None:
            continue
        label = "TVD, δ = 0.4" if name == "lantern_paper_0.4" else cell["label"]
        lines.append([label, _cost(cell)[0], f"{length:.2f}", *_quality(cell), f"{distance:.2f}"])
    return _table(["setting", "acceptance length", "the paper's", *QUALITY_HEAD, "the paper's FID"], lines)


def sweep_table(results: Results) -> str:
    """The trade-off's points (Figure 5)."""
    rows, share = results["kinds"]["text"]["rows"], results["kinds"]["text"]["settings"]["k"]
    lines = []
    for (k, delta), cell in _points(rows).items():
        lines.append([f"{share[str(k)]}", f"{delta}", _cost(cell)[0], *_quality(cell)])
    return _table(["k", "δ", "acceptance length", *QUALITY_HEAD], lines)


def _points(rows: dict[str, Any]) -> dict[tuple[int, float], dict[str, Any]]:
    """Settings of the trade-off, in order of k and δ."""
    found = {}
    for k in KS:
        for delta in DELTAS:
            for name in (f"sweep_{k}_{delta}", f"lantern_coupled_{delta}" if k == KS[-1] else ""):
                if f"1/{name}" in rows:
                    found[(k, delta)] = rows[f"1/{name}"]
    return found


def claims_table(results: Results) -> str:
    """LANTERN's claims and whether they hold here."""
    return deciding.claims_table(results.get("claims", []))


# LANTERN's Table 1, greedy, LlamaGen-3B, with Vicuna-7B's lengths on text in brackets.
PAPER_NAIVE = {"sd": "1.40 (2.36)", "medusa": "1.38 (2.52)", "eagle2": "2.11 (4.98)"}


def naive_table(results: Results) -> str:
    """The paper's Table 1: what drafters of texts accept of images, greedy."""
    rows, lines = results["kinds"]["text"]["rows"], []
    for name, printed in PAPER_NAIVE.items():
        cell = rows.get(f"0/{name}")
        if cell is not None:
            lines.append([cell["label"], _cost(cell)[0], printed, f"{cell['drafted_per_step']:.1f}", _cost(cell)[-1]])
    return _table(["method", "acceptance length", "the paper's (on text)", "drafted per step", "equal"], lines)


def guidance_table(results: Results) -> str:
    """Acceptance length and quality over scales of guidance, at temperature 1."""
    lines, cells = [], results["kinds"]["text"]["guidance"]
    for scale in GUIDANCE:
        for name in GUIDED_ROWS:
            cell = cells.get(f"{scale:g}/{name}")
            if cell is not None:
                lines.append([f"{scale:g}", cell["label"], _cost(cell)[0], _cost(cell)[-1], *_quality(cell)])
    return _table(["guidance", "method", "acceptance length", "equal", *QUALITY_HEAD], lines)


def guidance_line(results: Results) -> str:
    """One sentence: at which guidance noise that is shared, and loses nothing, reaches LANTERN at δ = 0.4."""
    found: dict[Holds, list[str]] = {True: [], False: [], None: []}
    cells = results["kinds"]["text"]["guidance"]
    for scale in GUIDANCE:
        if f"{scale:g}/lantern_paper_0.4" in cells:
            holds, coupled, relaxed = reaches(cells, scale)
            found[holds].append(f"{scale:g} ({coupled:.2f} against {relaxed:.2f})")
    words = {True: "accepts more at guidance", False: "accepts less at", None: "is not told apart at"}
    told = "; ".join(f"{words[holds]} {', '.join(scales)}" for holds, scales in found.items() if scales)
    return (
        "Noise shared by drafter and target loses nothing. Beside LANTERN with the paper's residual at δ = 0.4, which "
        f"is lossy, it {told} (codes per step of the target)."
    )


TABLES = {
    "lantern_settings": settings_table,
    "lantern_rows": rows_table,
    "lantern_class_rows": class_rows_table,
    "lantern_flatness": flatness_table,
    "lantern_premise": premise_table,
    "lantern_probability": probability_table,
    "lantern_hits": hits_table,
    "lantern_sweep": sweep_table,
    "lantern_ablation": ablation_table,
    "lantern_claims": claims_table,
    "lantern_naive": naive_table,
    "lantern_guidance": guidance_table,
}
LINES = {"lantern_guidance_line": guidance_line}
"""Sentences, by the same marks."""


def draw_trade_off(results: Results) -> str:
    """Acceptance length against attributes that are as asked, for k and δ under coupled noise, and other rules."""
    rows, share = results["kinds"]["text"]["rows"], results["kinds"]["text"]["settings"]["k"]
    points = _points(rows)
    lines = {
        f"k = {share[str(k)]}, δ rising": [_place(cell) for (own, _), cell in points.items() if own == k] for k in KS
    }
    for label, names in (
        ("the paper's residual", ("lantern_paper_0.1", "metric_l2", "lantern_paper_0.4")),
        ("EAGLE-2", ("eagle2_rejection", "eagle2_coupled")),
    ):
        lines[label] = [_place(rows[f"1/{name}"]) for name in names if f"1/{name}" in rows]
    lines = {label: places for label, places in lines.items() if places}
    return trade_off(lines, "mean acceptance length", "distance to real images")


def _place(cell: dict[str, Any]) -> tuple[float, float]:
    return cell["mean_acceptance_length"], cell["frechet_real"]
