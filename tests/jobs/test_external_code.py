"""The drafter and the format of the guide, in a folder of their own: checked, run on Ray, refused after a change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import check_method
from jobs.terminal.exit_status import DONE, FAILED, REFUSED
from zoo.text import held_out_questions
from zoo.world import listing

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/guides/examples"
GUIDE = ROOT / "docs/guides/extend.md"
NUM_ROWS = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example of the guide with a source, beside a folder that is the working directory."""
    for name in ("bigram.py", "bigram.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "pairs.py").write_text(next(block for block in blocks if "class Pairs" in block))
    prompts = [listing.write_prompt(*asked).replace("\n", " ") for asked in held_out_questions(NUM_ROWS, 5)]
    (tmp_path / "data.pairs").write_text("".join(f"row-{i}={prompt}\n" for i, prompt in enumerate(prompts)))
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    return tmp_path


def caption(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the job as a user does: in another process, and with a Ray of its own."""
    command = [sys.executable, "-m", "draftfleet", "caption", "bigram.yaml"]
    settings = [
        f"model.target.path={ROOT}/zoo/checkpoints/text_target",
        "model.target.dtype=float32",
        "sampling.max_new_tokens=12",
        "pool={slots: 4, max_context_tokens: 256}",
        "sink.keep_tokens=true",
        "job.progress=false",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *settings, *overrides], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )


def tokens(output: Path) -> dict[str, list[int]]:
    rows = [row for path in sorted(output.glob("data/*.parquet")) for row in pq.read_table(path).to_pylist()]
    return {row["sample_id"]: row["token_ids"] for row in rows}


def test_the_drafter_of_the_guide_has_about_forty_lines() -> None:
    assert len((EXAMPLES / "bigram.py").read_text().splitlines()) <= 50


@pytest.mark.slow
def test_the_drafter_and_the_format_of_the_guide_run_on_ray_with_the_tokens_of_plain_decoding(folder: Path) -> None:
    pairs = ("source={kind: 'pairs:KIND', path: data.pairs, id_column: id}",)
    done = caption(folder, *pairs)
    assert done.returncode == DONE, done.stderr
    assert "BigramDrafter+chain+exact (lossless)" in done.stdout
    assert caption(folder, *pairs, "method=plain", "sink.path=plain").returncode == DONE
    own = tokens(folder / "captions")
    assert own == tokens(folder / "plain")
    assert sorted(own) == sorted(f"row-{i}" for i in range(NUM_ROWS))
    (folder / "bigram.py").write_text((folder / "bigram.py").read_text() + "\n# changed\n")
    changed = caption(folder, *pairs)
    assert changed.returncode == REFUSED
    name = r"'bigram:BigramDrafter sha256:\w{64}'"
    assert re.search(f"revisions.method.drafter: {name} then, {name} now", changed.stderr)


@pytest.mark.slow
def test_all_checks_pass_for_the_drafter_of_the_guide_and_fail_for_a_broken_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_method.main([str(folder / "bigram.yaml")]) == DONE
    shown = capsys.readouterr().out
    assert shown.startswith("method: BigramDrafter+chain+exact, lossless\n  passed  greedy tokens, batch 1")
    assert "FAILED" not in shown
    text = (folder / "bigram.py").read_text()
    (folder / "bigram.py").write_text(text.replace("self.vocab_size), -torch.inf", "self.vocab_size + 1), -torch.inf"))
    assert check_method.main([str(folder / "bigram.yaml")]) == FAILED
    reason = "BigramDrafter.draft returned logits of shape (1, 1, 65), and it must be (1, 1, 64)"
    assert f"FAILED  greedy tokens, batch 1: ContractError: {reason}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_tree_and_the_rule_of_the_guide_pass_all_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for kind, block in blocks:
        if "AmongTheBest" in block:
            (tmp_path / ("mine.py" if kind == "python" else "mine.yaml")).write_text(block)
    assert check_method.main([str(tmp_path / "mine.yaml")]) == DONE
    assert "method: model+TwoThenOne+AmongTheBest, lossy" in capsys.readouterr().out


def test_code_that_a_method_does_not_name_is_reported_as_not_checked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.yaml").write_text('source: {kind: "pairs:KIND"}\nmethod: {drafter: {kind: "bigram:Big"}}\n')
    assert check_method.main([str(folder / "own.yaml")]) == REFUSED
    assert capsys.readouterr().out == "not checked here: source.kind pairs:KIND; `--dry-run` of the job checks it\n"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("method.drafter.kind=bigrams:Big", "method.drafter: bigrams:Big: there is no module 'bigrams'"),
        ("method.drafter.kind=bigram:Big", "method.drafter.kind: bigram:Big: 'bigram' has no 'Big'"),
        ("method.drafter.options={depth: 1}", "method.drafter.options: bigram:BigramDrafter refuses them: TypeError"),
        ("source.path=x", "override 'source.path=x': only values of the section method are taken"),
    ],
)
def test_a_method_that_cannot_be_made_is_refused_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, reason: str
) -> None:
    assert check_method.main([str(folder / "bigram.yaml"), override]) == REFUSED
    shown = capsys.readouterr()
    assert shown.err.startswith(f"refused: {reason}")
    assert not shown.out
    assert len(shown.err.splitlines()) == 1
