"""A head is trained from an ordinary source, evaluated on held-out rows, and used in a caption job."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.loading.pair import load
from configs.load import load_preset
from configs.schema import CaptionJobConfig
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from jobs.train_drafter import DONE, FAILED, REFUSED, main
from models.heads.formats import EAGLE
from models.heads.loader import load_head
from models.heads.training.trainer import Trainer
from models.llamagen.checkpoints import save_gpt
from models.llamagen.eagle import image_head
from models.llamagen.shape import VqShape
from models.llamagen.vq import Vq
from models.llamagen.vq_files import save_vq
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests import toys
from tests.toys import images as image_toys
from zoo.world import sample_scenes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/jobs/train_zoo_medusa.yaml"
QUICK = (
    "training.num_steps=4",
    "training.batch_rows=4",
    "training.held_out_share=0.3",
    "training.held_out_rows=2",
    "training.warmup_steps=1",
    "acceptance.num_rows=2",
    "acceptance.max_new_tokens=16",
    "workers.torch_threads=1",
)

Weights = dict[str, torch.Tensor]


def weights_of(folder: Path) -> Weights:
    (file,) = folder.glob("*.safetensors")
    assert file.stat().st_mode == (folder / "config.json").stat().st_mode, "others cannot read it"
    return load_file(file)


def same(weights: Weights, other: Weights) -> bool:
    return weights.keys() == other.keys() and all(torch.equal(weights[name], other[name]) for name in weights)


def measured(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "training.json").read_text())["measured"]
    return record


# --- texts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen scenes in two files, one picture torn and one answer missing among them."""
    folder = tmp_path_factory.mktemp("source")
    scenes = list(enumerate(sample_scenes("test", 16, 3)))
    for name, some in (("a", scenes[:7]), ("b", scenes[7:])):
        rows: dict[str, list[object]] = {"id": [], "image": [], "question": [], "truth": []}
        for index, (_, image, caption, prompt) in some:
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            rows["id"].append(f"s{index}")
            rows["image"].append(b"torn" if index == 4 else buffer.getvalue())
            rows["question"].append(prompt)
            rows["truth"].append(None if index == 5 else caption)
        pq.write_table(pa.table(rows), folder / f"{name}.parquet")
    return folder


def command(source: Path, out: Path, *overrides: str) -> list[str]:
    return ["--config", CONFIG, f"source.path={source}", f"output.path={out}", *QUICK, *overrides]


METHODS = {
    "eagle3": "{drafter: {kind: eagle3}, tree: {kind: dynamic, top_k: 4, depth: 2, total_tokens: 12}}",
    "block": "{drafter: {kind: block}, tree: {kind: chain, length: 7}}",
    "layer_cut": "{drafter: {kind: model}, tree: {kind: chain, length: 4}}",
}


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "block", "layer_cut"])
def test_a_trained_head_drafts_in_a_caption_job_without_changing_its_text(
    kind: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    # The target has three layers.
    head = "head={kind: layer_cut, num_layers: 2}" if kind == "layer_cut" else f"head={{kind: {kind}}}"
    assert main(command(source, out, head)) == DONE
    output = capsys.readouterr()
    assert str(out) in output.out
    assert "step 4/4 loss" in output.err
    assert "rows/s" in output.err
    metrics = measured(out)
    assert metrics["left_out"] == {"not_an_image": 1, "missing_answer": 1}
    assert metrics["num_held_out_rows"] == 2
    assert metrics["mean_acceptance_length"] >= 1.0
    assert metrics["num_decoded"] == 2
    assert 0 <= metrics["top1_accuracy"] <= metrics["top3_accuracy"] <= 1
    assert not list(out.glob("*.bin")) + list(out.glob("*.pt")), "nothing that is kept needs unpickling"
    assert not (out / "_job" / "checkpoint.pt").exists()
    _, image, _, prompt = sample_scenes("test", 1, 9)[0]
    texts = []
    for preset in (kind if kind == "medusa" else "eagle2", "plain"):
        overrides = (f"model.drafter.path={out}",) if preset != "plain" else ()
        if preset != "plain" and kind in METHODS:
            overrides += (f"method={METHODS[kind]}",)
        pair = load(load_preset(CaptionJobConfig, f"zoo_{preset}", overrides))
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
        request = Request(
            "one", pair.render([message]), (np.asarray(image.convert("RGB")),), sampling=Sampling(max_new_tokens=30)
        )
        (done,) = pair.engine(1).run([request])
        texts.append(done.token_ids)
    assert texts[0] == texts[1]


def test_an_mtp_layer_is_written_with_its_target_and_drafts_without_changing_texts(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "whole"
    assert main(command(source, out, "head={kind: mtp}")) == DONE
    assert f"{out} (as model.target.path, with method.drafter.kind=mtp)" in capsys.readouterr().out
    metrics = measured(out)
    assert metrics["left_out"] == {"not_an_image": 1, "missing_answer": 1}
    assert metrics["mean_acceptance_length"] >= 1.0
    _, image, _, prompt = sample_scenes("test", 1, 9)[0]
    texts = []
    for overrides in ((f"model.target.path={out}", "method=mtp"), ()):
        pair = load(load_preset(CaptionJobConfig, "zoo_plain", overrides))
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
        request = Request(
            "one", pair.render([message]), (np.asarray(image.convert("RGB")),), sampling=Sampling(max_new_tokens=30)
        )
        (done,) = pair.engine(1).run([request])
        texts.append(done.token_ids)
        assert (done.telemetry.num_draft_tokens > 0) == bool(overrides)
    assert texts[0] == texts[1]
    # A second layer has no place.
    assert main(command(source, tmp_path / "twice", "head={kind: mtp}", f"target.path={out}")) == REFUSED
    assert "it has an MTP layer already, at mtp.*" in capsys.readouterr().err


def test_every_row_is_trained_on_held_out_or_counted(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    assert main(command(source, out, "training.held_out_rows=16", "training.num_steps=8")) == DONE
    metrics = measured(out)
    assert metrics["num_epochs"] >= 2
    assert metrics["num_taught_rows"] + metrics["num_held_out_rows"] + sum(metrics["left_out"].values()) == 16


def test_a_head_is_trained_for_any_family(tmp_path: Path) -> None:
    """Qwen's processors give more than pixels; its positions have three axes."""
    toys.save("qwen2_5_vl", tmp_path / "target")
    tokenizer = toys.processor("qwen2_5_vl").tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.content %}"
        "{{ 'w5 <image> w6 ' if c.type == 'image' else c.text }}{% endfor %}{% endfor %} w9"
    )
    tokenizer.save_pretrained(tmp_path / "target")
    images = []
    for seed in range(12):
        buffer = io.BytesIO()
        Image.fromarray(toys.picture(seed, "qwen2_5_vl")).save(buffer, "PNG")
        images.append(buffer.getvalue())
    (tmp_path / "source").mkdir()
    answers = [f"w{10 + seed} w{20 + seed} w{30 + seed}" for seed in range(12)]
    table = {"id": [f"s{seed}" for seed in range(12)], "image": images, "question": ["w7"] * 12, "truth": answers}
    pq.write_table(pa.table(table), tmp_path / "source" / "a.parquet")
    out = tmp_path / "head"
    job = command(tmp_path / "source", out, f"target.path={tmp_path / 'target'}", "head={kind: eagle}")
    assert main(job) == DONE
    assert measured(out)["left_out"] == {}
    assert weights_of(out)["fc.weight"].shape == (32, 64)


def test_a_layer_cut_drafter_is_trained_and_drafts_exactly(tmp_path: Path) -> None:
    toys.save("llama", tmp_path / "target")
    tokenizer = toys.processor("llama")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %} w9"
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"id": f"s{seed}", "q": f"w{5 + seed}", "a": f"w{10 + seed} w{20 + seed} w7"} for seed in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "job.yaml"
    config.write_text(
        f"source: {{kind: jsonl, path: {tmp_path / 'rows.jsonl'}, id_column: id}}\n"
        "prompt: '{q}'\nanswer_column: a\n"
        f"target: {{path: {tmp_path / 'target'}}}\n"
        f"output: {{path: {tmp_path / 'drafter'}}}\n"
        "head: {kind: layer_cut, layers: [1]}\n"
    )
    assert main(["--config", str(config), *QUICK]) == DONE
    assert measured(tmp_path / "drafter")["mean_acceptance_length"] >= 1.0
    target, drafter = (Target.load(CheckpointRef(str(tmp_path / name))) for name in ("target", "drafter"))
    assert drafter.decoder.config.num_hidden_layers == 1  # type: ignore[union-attr]
    prompt = target.front_end.render([{"role": "user", "content": [{"type": "text", "text": "w5 w6"}]}])
    method = Method(ModelDrafter(drafter, [Full()], target.vocab_size), Chain(3), Exact())
    request = Request("one", prompt, (), sampling=Sampling(max_new_tokens=12))
    (done,) = Engine(target, method, 1, 64).run([request])
    assert done.error is None
    ids = target.encode(prompt, ()).token_ids[None]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert list(done.token_ids) == expected[0, ids.shape[1] :].tolist()


def test_layer_cut_drafters_that_cannot_be_made_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.save("qwen3_vl", tmp_path / "deepstack")
    for overrides, message in (
        ((f"target.path={tmp_path / 'deepstack'}",), "whose first layers receive visual features"),
        (("head.num_layers=0",), "head.num_layers"),
        (("head.layers=[40]",), "head.layers: name layers from 0 to"),
    ):
        assert main(command(source, tmp_path / "head", "head={kind: layer_cut}", *overrides)) == REFUSED
        assert message in capsys.readouterr().err
        assert not (tmp_path / "head").exists()


# --- images --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny LlamaGens, a VQ model of as many codes, and rows with codes, features, labels and pictures."""
    root = tmp_path_factory.mktemp("images")
    for kind in image_toys.KINDS:
        save_gpt(image_toys.target(kind).gpt, root / kind)
    torch.manual_seed(0)
    save_vq(Vq(VqShape(image_toys.CODES, 4, 16, (1, 2), 1, 16)), root / "vq")
    generator = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"id": [], "codes": [], "features": [], "label": [], "picture": []}
    for index in range(24):
        buffer = io.BytesIO()
        Image.fromarray(generator.integers(0, 256, (20, 12 + index, 3), dtype=np.uint8)).save(buffer, "PNG")
        rows["id"].append(f"s{index}")
        rows["codes"].append(generator.integers(0, image_toys.CODES, 16).tolist())
        rows["features"].append(image_toys.condition("text", index).tolist())
        rows["label"].append(index % 5)
        rows["picture"].append(buffer.getvalue())
    rows["codes"][1] = rows["codes"][1][:-1]
    rows["codes"][2] = [image_toys.CODES] * 16
    rows["label"][3] = 77
    (root / "rows").mkdir()
    pq.write_table(pa.table(rows), root / "rows" / "a.parquet")
    return root


def image_job(world: Path, out: Path, kind: str, *overrides: str) -> list[str]:
    config = out.parent / f"{out.name}.yaml"
    columns = "{codes: codes, features: features}" if kind == "text" else "{codes: codes, label: label}"
    config.write_text(
        f"source: {{kind: parquet, path: {world / 'rows'}, id_column: id}}\n"
        f"image: {{columns: {columns}, null_share: 0.5}}\n"
        f"target: {{path: {world / kind}}}\n"
        "training: {num_steps: 6, batch_rows: 4, held_out_share: 0.3, held_out_rows: 3, learning_rate: 0.01}\n"
        "acceptance: {num_rows: 2, guidance_scale: 2.0}\n"
        f"output: {{path: {out}}}\n"
    )
    return ["--config", str(config), *overrides]


@pytest.mark.parametrize("kind", image_toys.KINDS)
def test_a_head_for_images_is_trained_in_both_lanes_and_drafts_without_conversion(
    kind: str, image_world: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    assert main(image_job(image_world, out, kind)) == DONE
    metrics = measured(out)
    wrong = {"wrong_codes": 2} if kind == "text" else {"wrong_codes": 2, "invalid_condition": 1}
    assert sum(metrics["left_out"].values()) + metrics["num_taught_rows"] <= 24
    assert metrics["left_out"].items() <= wrong.items()
    assert (metrics["num_held_out_rows"], metrics["num_decoded"]) == (3, 2)
    target = image_toys.target(kind)
    head = load_head(image_head(EAGLE, target.gpt.shape), CheckpointRef(str(out)), "auto", torch.device("cpu"))
    assert torch.equal(head.embed_tokens.weight, target.gpt.embed_tokens.weight)


def test_pictures_are_encoded_by_the_vq_model(image_world: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    columns = (f"image={{columns: {{label: label}}, vq: {{path: {image_world / 'vq'}}}}}", "training.num_steps=3")
    assert main(image_job(image_world, out, "class", "source.columns.image=picture", *columns)) == DONE
    assert measured(out)["left_out"].keys() <= {"invalid_condition"}


# --- a run that was cut --------------------------------------------------------------------------------------------


def cut_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the machine fail while a step is being taken."""
    learn = Trainer.learn

    def fail(self: Trainer, *args: Any) -> Any:
        if self.step == step:
            raise OSError("the machine is taken away")
        return learn(self, *args)

    monkeypatch.setattr(Trainer, "learn", fail)


@pytest.mark.parametrize(("kind", "cache_bytes"), [("medusa", 0), ("medusa", 150_000), ("text", 10**9)])
def test_an_interrupted_run_resumes_to_a_bitwise_equal_head(
    kind: str, cache_bytes: int, source: Path, image_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(out: Path) -> list[str]:
        more = ("training.num_steps=9", "training.measure_every_steps=4", "training.shuffle_rows=5")
        more += ("acceptance.num_rows=0", f"workers.teacher_cache.max_bytes={cache_bytes}")
        if kind == "text":
            return image_job(image_world, out, kind, *more)
        return command(source, out, *more)

    assert main(job(tmp_path / "whole")) == DONE
    for step, every_s in ((3, 0), (7, 1e9), (8, 0)):
        with monkeypatch.context() as patch:
            cut_at(step, patch)
            assert main([*job(tmp_path / "cut"), f"workers.checkpoint_every_s={every_s}"]) == FAILED
    assert main(job(tmp_path / "cut")) == DONE
    assert same(weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut"))
    whole, cut = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("whole", "cut"))
    assert whole["history"] == cut["history"]
    assert [each["step"] for each in cut["history"]] == [4, 8, 9]
    del whole["measured"]["seconds"], cut["measured"]["seconds"]
    assert whole["measured"] == cut["measured"]


def test_a_killed_process_resumes(source: Path, tmp_path: Path) -> None:
    """SIGKILL right behind a checkpoint, whatever was open."""
    program = (
        "import os, sys, pipeline.training.run as t\n"
        "save = t.TrainingRun._save\n"
        "def kill(self):\n    save(self)\n    os.kill(os.getpid(), 9)\n"
        "t.TrainingRun._save = kill\n"
        "from jobs.train_drafter import main\nmain(sys.argv[1:])\n"
    )
    job = command(source, tmp_path / "head", "workers.checkpoint_every_s=0")
    killed = subprocess.run([sys.executable, "-c", program, *job], cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    assert (tmp_path / "head" / "_job" / "checkpoint.pt").exists()
    assert main(job) == DONE
    log = (tmp_path / "head" / "_job" / "log.txt").read_text()
    assert "resuming after step 1" in log


@pytest.fixture
def begun(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was cut after a checkpoint."""
    with monkeypatch.context() as patch:
        cut_at(2, patch)
        assert main(command(source, tmp_path / "head", "workers.checkpoint_every_s=0")) == FAILED
    return tmp_path / "head"


def torn(folder: Path) -> None:
    file = folder / "_job" / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:200])


def pickled(folder: Path) -> None:
    torch.save({"format": 1, "trainer": os.system}, folder / "_job" / "checkpoint.pt")


def finished(folder: Path) -> None:
    (folder / "training.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "overrides", "message"),
    [
        (None, ("training.learning_rate=0.5",), "begun otherwise: training.learning_rate changed"),
        (None, ("head.num_heads=2", "training.seed=9"), "head.num_heads, training.seed changed"),
        (torn, (), "checkpoint.pt cannot be read"),
        (pickled, (), "checkpoint.pt cannot be read"),
        (finished, (), "holds a finished head"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_refused(
    spoil: Callable[[Path], None] | None,
    overrides: tuple[str, ...],
    message: str,
    begun: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if spoil:
        spoil(begun)
    assert main(command(source, begun, *overrides)) == REFUSED
    assert message in capsys.readouterr().err


def test_a_source_that_changed_meanwhile_is_refused(
    begun: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = source / "c.parquet"
    pq.write_table(pq.read_table(source / "a.parquet"), later)
    try:
        assert main(command(source, begun)) == REFUSED
    finally:
        later.unlink()
    assert "source.listing, source.num_files changed" in capsys.readouterr().err


def test_fields_outside_the_fingerprint_may_change_between_runs(begun: Path, source: Path) -> None:
    assert main(command(source, begun, "workers.max_forward_rows=2", "workers.read_ahead_batches=1")) == DONE


def test_two_runs_never_share_a_folder(begun: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import fcntl, sys\nlock = open(sys.argv[1], 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('in', flush=True)\nsys.stdin.read()\n"
    )
    lock = begun / "_job" / "lock"
    other = subprocess.Popen([sys.executable, "-c", program, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"in\n"
        assert main(command(source, begun)) == REFUSED
    finally:
        other.communicate()
    assert "another process is training" in capsys.readouterr().err


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("answer_column=nothing",), "answer_column: the column 'nothing'"),
        (("answer_column=images",), "answer_column: 'images' is a name of our own"),
        (("training.held_out_share=0.0001",), "raise training.held_out_share"),
        (("training.max_tokens=16",), "too_long"),
        (("head.kind=other",), "head"),
        (("head={kind: block, mask_token_id: 2}",), "head.mask_token_id: 2 ends answers"),
        (("head={kind: block, mask_token_id: 806}",), "head.mask_token_id: 806 is outside the 806 tokens"),
        (("head={kind: block, mask_token_id: 3}",), "head.mask_token_id: 3 has an embedding of zeros"),
        (("head={kind: block, feature_layers: [3]}",), "head.feature_layers: 3 is no state below a layer"),
        (("head={kind: block, block_size: 33}",), "head.block_size"),
        (("head={kind: block, feature_layers: []}",), "head.feature_layers"),
        (("head={kind: eagle3, feature_layers: []}",), "head.feature_layers"),
        (("target.path=nowhere/at/all",), "target: nowhere/at/all"),
        (("training.num_steps=0",), "training.num_steps"),
        (("training.warmup_steps=4",), "warmup_steps (4) must be fewer than num_steps (4)"),
        (("image={columns: {codes: truth, label: truth}}",), "either answer_column"),
        (("output.path=s3://bucket/head",), "output.path: s3://bucket/head must be a folder"),
        (("workers.count=0",), "workers.count"),
    ],
)
def test_a_training_job_that_cannot_work_is_refused(
    overrides: tuple[str, ...], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(source, tmp_path / "head", *overrides)) == REFUSED
    refusal = capsys.readouterr().err
    assert refusal.count("refused:") == 1
    assert message in refusal


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("class", ("image.columns={codes: codes, features: features}",), "is class-conditional"),
        ("text", ("image.columns={codes: codes, label: label}",), "is text-conditional"),
        ("text", ("image.columns={features: features}",), "give either columns.codes, or vq"),
        ("text", ("image.columns={codes: codes}",), "give one of columns.features"),
        ("text", ("image.columns={codes: codes}", "image.condition={path: x}"), "image.condition encodes the prompt"),
        ("text", ("image.columns.codes=nothing",), "image.columns.codes: the column 'nothing'"),
        ("text", ("target.path=zoo/checkpoints/caption_target",), "target: zoo/checkpoints/caption_target"),
        ("text", ("image.columns={features: features}", "image.vq={path: nowhere/x/y}"), "image.vq: nowhere/x/y"),
        ("text", ("training.held_out_share=0.9999",), "no row is left to learn from"),
    ],
)
def test_an_image_job_that_cannot_work_is_refused(
    kind: str,
    overrides: tuple[str, ...],
    message: str,
    image_world: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(image_job(image_world, tmp_path / "head", kind, *overrides)) == REFUSED
    assert message in capsys.readouterr().err


def test_a_head_is_never_written_over_another(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(command(source, tmp_path)) == REFUSED
    assert "is not empty" in capsys.readouterr().err


# --- several workers -----------------------------------------------------------------------------------------------
