"""The cache of teacher states: what is stored is what was computed, within the bound, and damage is never read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.contract import TargetModel
from models.heads.training.eagle3_loss import fresh_eagle3
from models.heads.training.losses import HeadTask, fresh_eagle, fresh_medusa
from models.heads.training.teacher import RowStates, Sample, States, teach_rows
from models.heads.training.teacher_cache import TeacherCache, key_of_sample
from models.heads.training.trainer import Pace, Trainer, count_right
from tests.toys.training import training_samples

MANY = 1 << 30


def keys(count: int) -> list[str]:
    return [key_of_sample("target", str(number)) for number in range(count)]


def filled(folder: Path, max_bytes: int = MANY) -> tuple[TeacherCache, list[str], list[RowStates]]:
    target, made = training_samples()
    cache, rows = TeacherCache(folder, max_bytes), teach_rows(target, made, (0, 1))
    names = keys(len(rows))
    for key, row in zip(names, rows, strict=True):
        cache.put(key, row)
    return cache, names, rows


def same(states: RowStates, other: RowStates) -> bool:
    tensors, expected = states.tensors(), other.tensors()
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llama"])
@pytest.mark.parametrize("layers", [(-1,), (0, 1)])
def test_states_are_read_back_bitwise(family: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    target, made = training_samples(family)
    rows = teach_rows(target, made, layers)
    cache = TeacherCache(tmp_path, MANY)
    for key, row in zip(keys(6), rows, strict=True):
        assert cache.put(key, row)
    states = [TeacherCache(tmp_path, MANY).get(key) for key in keys(6)]
    assert all(other is not None and same(row, other) for row, other in zip(rows, states, strict=True))
    batch = States.of([other for other in states if other is not None], target.device)
    expected = States.of(rows, target.device)
    assert all(
        torch.equal(getattr(batch, name), getattr(expected, name)) for name in ("hidden", "features", "received")
    )


def heads(kind: str, target: TargetModel) -> HeadTask:
    if kind == "medusa":
        return fresh_medusa(target, 0, 3)
    return fresh_eagle(target, 0) if kind == "eagle" else fresh_eagle3(target, 0, 2, feature_layers=(0, 1))


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_heads_trained_from_stored_states_equal_those_trained_beside_the_target(kind: str, tmp_path: Path) -> None:
    """Rounding of the target's forward depends on its batch, so the batches are equal and the heads bitwise equal."""
    target, made = training_samples()
    cache = TeacherCache(tmp_path, MANY)
    beside, stored = (Trainer(target, heads(kind, target), Pace(6, 3e-3, seed=7)) for _ in range(2))

    def keep(ordinal: int, states: RowStates) -> RowStates:
        assert cache.put(keys(6)[ordinal % 6], states)
        return states

    for epoch in range(3):
        batch: list[tuple[int, Sample]] = [(6 * epoch + number, each) for number, each in enumerate(made)]
        beside.learn(batch)
        if epoch:
            batch = [(ordinal, cache.get(keys(6)[ordinal % 6]) or made[0]) for ordinal, _ in batch]
            assert all(isinstance(each, RowStates) for _, each in batch)
        stored.learn(batch, keep)
    assert all(torch.equal(value, stored.weights()[name]) for name, value in beside.weights().items())
    rows = [row for key in keys(6) if (row := cache.get(key))]
    assert count_right(stored.task, target, rows) == count_right(beside.task, target, made)


def test_states_shifted_by_one_position_or_of_another_row_teach_another_head(tmp_path: Path) -> None:
    """The equality above detects such faults: it is not satisfied by any states of equal shapes."""
    target, made = training_samples()
    rows = sorted(teach_rows(target, made[:2]), key=lambda row: row.length)
    shifted = [replace(row, hidden=row.hidden.roll(1, 0)) for row in rows]
    of_another = [replace(rows[0], hidden=rows[1].hidden[: rows[0].length]), rows[1]]
    weights = []
    for each in (rows, shifted, of_another):
        trainer = Trainer(target, fresh_eagle(target, 0), Pace(2, 3e-3))
        trainer.learn(list(enumerate(each)))
        weights.append(trainer.weights()["fc.weight"])
    assert not any(torch.equal(weights[0], other) for other in weights[1:])


def test_the_cache_stays_within_its_bound_at_the_edge(tmp_path: Path) -> None:
    whole, names, rows = filled(tmp_path / "whole")
    sizes = [(tmp_path / "whole" / key[:2] / f"{key}.safetensors").stat().st_size for key in names]
    assert whole.num_bytes == sum(sizes)
    exact, *_ = filled(tmp_path / "exact", sum(sizes[:3]))
    assert [exact.has(key) for key in names[:4]] == [True, True, True, False]
    assert exact.num_bytes == exact.max_bytes
    less, *_ = filled(tmp_path / "less", sum(sizes[:3]) - 1)
    assert less.num_bytes <= less.max_bytes
    assert not less.has(names[2])
    again = TeacherCache(tmp_path / "exact", sum(sizes[:3]))
    assert not again.put(names[3], rows[3]), "files of an earlier process count"
    assert again.put(names[0], rows[0]), "replacing a file needs no more space"
    assert again.num_bytes == again.max_bytes
    shared = TeacherCache(tmp_path / "shared", 2 * sizes[0] + 1, share=2)
    assert shared.put(names[0], rows[0])
    assert not shared.put(names[3], rows[0]), "a worker takes no more than its share"


def test_a_truncated_file_is_removed_and_not_read(tmp_path: Path) -> None:
    cache, names, _ = filled(tmp_path)
    file = tmp_path / names[0][:2] / f"{names[0]}.safetensors"
    for size in (file.stat().st_size - 1, 9, 0):
        file.write_bytes(file.read_bytes()[:size])
        assert cache.get(names[0]) is None
        assert not file.exists()
        file.write_bytes(b"x" * 100)
    assert cache.num_damaged == 3


def test_a_changed_value_or_another_rows_file_is_not_read(tmp_path: Path) -> None:
    cache, names, rows = filled(tmp_path)
    first, second = (tmp_path / key[:2] / f"{key}.safetensors" for key in names[:2])
    first.write_bytes(second.read_bytes())
    assert cache.get(names[0]) is None
    tensors = load_file(second)
    tensors["hidden"][0, 0] += 1
    save_file(tensors, second, metadata={"key": names[1], "digest": "0" * 32})
    assert cache.get(names[1]) is None
    assert cache.num_damaged == 2
    states = cache.get(names[2])
    assert states is not None
    assert same(states, rows[2])


def test_partial_files_are_not_read_and_are_removed(tmp_path: Path) -> None:
    cache, names, rows = filled(tmp_path)
    file = tmp_path / names[0][:2] / f"{names[0]}.safetensors"
    file.rename(file.with_suffix(".tmp"))
    assert cache.get(names[0]) is None
    again = TeacherCache(tmp_path, MANY)
    again.discard_partial()
    assert not list(tmp_path.glob("*/*.tmp"))
    assert again.put(names[0], rows[0])


def test_a_full_disk_stops_writing_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, names, rows = filled(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    other = key_of_sample("other")
    assert not cache.put(other, rows[0])
    monkeypatch.undo()
    assert not cache.put(other, rows[0])
    assert not list(tmp_path.glob("*/*.tmp"))
    assert cache.get(names[1]) is not None


def test_keys_depend_on_each_part_and_on_where_parts_end() -> None:
    assert (
        len({key_of_sample("a", "bc"), key_of_sample("ab", "c"), key_of_sample("abc"), key_of_sample("a", "bd")}) == 4
    )
