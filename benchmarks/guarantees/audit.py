"""Measures how often the audit's interval contains the true loss of a lossy method, over many choices of rows.

    python -m benchmarks.guarantees.audit       # writes results/audit.json; minutes

Each case is one job with `audit.share: 1.0`, so that every row has its loss; their mean is the true loss. For each seed
the interval is then computed from the rows that `audit.share` chooses with it, after every row in the order of the
output. `ever outside` are the seeds whose interval missed the true loss at any number of rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.serving.audited import is_audited
from benchmarks.harness.markdown import Results
from benchmarks.harness.results import command_line, machine, progress, results_file
from benchmarks.tables.parts import finish
from configs.acceptance import AuditConfig
from jobs import caption
from pipeline.reports.loss import Losses, loss_interval, verdict
from zoo.demo import draw_rows, write_parquet
from zoo.text import held_out_questions
from zoo.world import listing

RESULTS = results_file("audit")
ROOT = Path(__file__).resolve().parents[2]
NUM_SEEDS, SHARE, CONFIDENCE = 20, 0.2, 0.95
NUM_SCENES, NUM_QUESTIONS, MAX_NEW_TOKENS = 240, 600, 48
CASES = {
    "lvspec, captions": "lvspec",
    "typical, texts": "{drafter: {kind: model}, tree: {kind: chain, length: 5}, acceptance: {kind: typical}}",
    "random, texts": "{drafter: {kind: model}, tree: {kind: chain, length: 5}, "
    "acceptance: {kind: random, probability: 0.05}}",
}
"""Name → method."""


def write_source(case: str, folder: Path) -> str:
    """Write the rows of a case, and return the pair that decodes them."""
    if case.endswith("captions"):
        write_parquet(draw_rows(NUM_SCENES, 5), folder / "rows")  # three rows are broken and have no loss
        return "caption"
    asked = [listing.write_prompt(*question) for question in held_out_questions(NUM_QUESTIONS, 9)]
    rows = {"id": [f"q{number}" for number in range(len(asked))], "question": asked}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    return "text"


def losses_of(case: str, folder: Path) -> pa.Table:
    """Run the job of a case, and return its rows in the order of the output."""
    source, out = folder / "source", folder / "out"
    source.mkdir()
    pair = write_source(case, source)
    job: dict[str, Any] = {
        "source": {"kind": "parquet", "path": str(source), "id_column": "id"},
        "prompt": "{question}",
        "model": {
            role: {"path": str(ROOT / f"zoo/checkpoints/{pair}_{role}"), "dtype": "float32"}
            for role in ("target", "drafter")
        },
        "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        "pool": {"slots": 32, "max_context_tokens": 512},
        "sink": {"path": str(out), "keep_tokens": True},
        "audit": {"share": 1.0, "metric": "edit"},
        "job": {"progress": False},
    }
    job["source"]["columns"] = {"image": "image"} if pair == "caption" else {}
    (folder / "job.yaml").write_text(json.dumps(job))
    if caption.main(["--config", str(folder / "job.yaml"), f"method={CASES[case]}"]) != caption.DONE:
        raise RuntimeError(f"{case}: the job failed")
    names = ["sample_id", "token_ids", "audit_token_ids", "audit_loss"]
    files = sorted((out / "data").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(path, columns=names) for path in files])


def measure(ids: Sequence[str], losses: Sequence[float]) -> Results:
    """Return the true loss, and the intervals of all seeds."""
    true = sum(losses) / len(losses)
    strict = AuditConfig(share=SHARE, max_loss=min(max(true / 2, 1e-3), 0.99), min_rows=len(losses))
    seeds = []
    for seed in range(NUM_SEEDS):
        chosen = [loss for name, loss in zip(ids, losses, strict=True) if is_audited(SHARE, seed, name)]
        ever_outside, ended_at, observed = False, None, Losses()
        low, high = 0.0, 1.0
        for loss in chosen:
            observed = observed.plus(Losses(1, loss))
            low, high = loss_interval(observed.num_rows, observed.total, CONFIDENCE)
            ever_outside |= not low <= true <= high
            if ended_at is None and verdict(strict, observed):
                ended_at = observed.num_rows
        is_inside = low <= true <= high
        seeds.append(
            {
                "seed": seed,
                "num_rows": observed.num_rows,
                "mean": round(observed.total / max(1, observed.num_rows), 5),
                "low": round(low, 5),
                "high": round(high, 5),
                "is_inside": is_inside,
                "ever_outside": ever_outside,
                "half_budget_ends_at": ended_at,
            }
        )
    return {"num_rows": len(losses), "true_loss": round(true, 5), "seeds": seeds}


def main() -> int:
    """Run all cases and write the results."""
    command_line("audit", __doc__).parse_args()
    results: Results = {"machine": machine(), "share": SHARE, "confidence": CONFIDENCE, "cases": {}}
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="draftfleet-audit-") as folder:
            rows = losses_of(case, Path(folder))
        ids = rows["sample_id"].to_pylist()
        pairs = zip(rows["token_ids"].to_pylist(), rows["audit_token_ids"].to_pylist(), strict=True)
        results["cases"][f"{case}, edit"] = measure(ids, rows["audit_loss"].to_pylist())
        results["cases"][f"{case}, exact"] = measure(ids, [float(tokens != plain) for tokens, plain in pairs])
        progress(case)
    return finish(RESULTS, results)


if __name__ == "__main__":
    sys.exit(main())
