"""An inventory that knows what an earlier one has read equals one that reads every file, and reads only new files."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cluster.partitions import IN_PROCESS
from pipeline.manifest.done_bitmap import DoneBitmap
from pipeline.manifest.manifest_parts import with_counts
from pipeline.output import files, inventory
from pipeline.output.files import list_published
from pipeline.output.inventory import Inventory
from pipeline.output.publishing import Fenced
from pipeline.run import finalize, resume
from pipeline.run.job_plan import ResumeOptions
from pipeline.storage.output_dir import DATA, ERRORS
from tests.covering import by_tier
from tests.pipeline.attempts import at_rest, end, job, make_rows, plan_of, run, save, start
from tests.pipeline.formats.shards import tar_bytes


def state_of(listed: Inventory) -> dict[str, Any]:
    """Everything that callers use of an inventory, in an order that does not depend on the order of reading."""
    done = {retry: listed.accounts.done(retry) for retry in (False, True)}
    return {
        "done": {retry: (bitmap._bits.tolist(), rows_of(bitmap)) for retry, bitmap in done.items()},
        "present": {retry: listed.accounts.present_ids(retry) for retry in (False, True)},
        "strange": sorted((file.relative, file.problem) for file in listed.strange),
        "spooled": listed.spooled,
        "spent": sorted(listed.spent),
        "doubled": listed.doubled,
        "superseded": {name: mask.tolist() for name, mask in listed.superseded.items()},
        "empty": listed.empty,
        "num_rows": listed.num_rows,
    }


def rows_of(done: DoneBitmap) -> dict[int, list[int]]:
    return {file: np.flatnonzero(bits).tolist() for file, bits in done._open.items() if bits.any()}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Compare every inventory that knows an earlier one with one that reads all files; yields (read, published)."""
    whole: Callable[..., Inventory] = inventory.take_inventory
    compared: list[tuple[int, int]] = []

    def take(
        output: Any,
        manifest: Any,
        rows: Any,
        fingerprints: Any,
        damaged: Any = None,
        known: Any = None,
        workers: Any = IN_PROCESS,
        unrecorded: Any = None,
    ) -> Inventory:
        listed = whole(output, manifest, rows, fingerprints, damaged, known, workers, unrecorded)
        if known is not None:
            again = whole(output, manifest, rows, fingerprints, damaged, unrecorded=unrecorded)
            assert state_of(listed) == state_of(again)
            compared.append((listed.num_files_read, len(list_published(output, DATA, ERRORS))))
        return listed

    monkeypatch.setattr(resume, "take_inventory", take)
    monkeypatch.setattr(finalize, "take_inventory", take)
    yield compared
    assert compared


def text_job(folder: Path, counts: list[int], **sections: Any) -> Any:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(counts):
        (folder / f"in/{number}.txt").write_text("".join(f"line {row}\n" for row in range(count)))
    source = {"kind": "text", "path": str(folder / "in"), "span_max_rows": 4}
    return job(source, folder / "out", **{"sink": {"rows_per_file": 5}, **sections})


def test_only_new_files_are_read_after_the_fence_and_at_the_end(tmp_path: Path, compared) -> None:
    config = text_job(tmp_path, [40, 60])
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 1, lambda own: own.endswith("7"))[:20])  # then killed
    before = len(list_published(plan.output, DATA, ERRORS))
    assert before > 10
    plan, begun = start(plan_of(config))
    fences = 5  # four in `data/` and one in `errors/`
    assert compared[-1] == (fences, before + fences)
    save(plan, begun, make_rows(plan, 2))
    published = len(list_published(plan.output, DATA, ERRORS)) - before - fences
    assert published > 3
    end(plan, begun)
    assert compared[-1] == (published, before + fences + published)
    assert len(at_rest(tmp_path / "out")[0]) + len(at_rest(tmp_path / "out")[1]) == 100


def test_a_second_attempt_publishes_between_the_inventories_of_the_first(tmp_path: Path, compared) -> None:
    config = text_job(tmp_path, [40, 60])
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 1)[:6])  # then killed
    first = plan_of(config)  # has taken its first inventory
    second, begun = start(plan_of(config))
    rows = make_rows(second, begun.publisher.attempt, lambda own: own.endswith("5"))
    save(second, begun, rows[:10])
    first, begun_first = start(first)  # takes over and takes its second inventory
    assert begun_first.publisher.attempt == begun.publisher.attempt + 1
    assert first.prior is not None
    assert len(first.prior.done) == 24 + 40
    with pytest.raises(Fenced):
        save(second, begun, rows[10:])
    with pytest.raises(Fenced):
        end(second, begun)
    save(first, begun_first, make_rows(first, begun_first.publisher.attempt))
    end(first, begun_first)
    good, bad = at_rest(tmp_path / "out")
    assert len(good) + len(bad) == 100
    assert bad
    assert all(own.endswith("5") for own in bad)


SECTIONS: list[dict[str, Any]] = [
    {},
    {"prompt": {"text": "{prompt}"}, "columns": {"prompts": "asked"}},
]


def several_prompts(folder: Path) -> None:
    """Write rows with two prompts each in place of text."""
    for path in (folder / "in").glob("*.txt"):
        lines = [f'{{"asked": ["{line} a", "{line} b"]}}' for line in path.read_text().splitlines()]
        path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
        path.unlink()


@pytest.mark.parametrize("seed", by_tier(range(4), 1, 1))
@pytest.mark.parametrize("sections", SECTIONS, ids=["one row", "two rows"])
def test_kills_and_overlaps_leave_inventories_that_are_equal(tmp_path: Path, compared, seed: int, sections) -> None:
    chance = random.Random(seed)
    config = text_job(tmp_path, [chance.randrange(1, 30) for _ in range(3)], **sections)
    if sections:
        several_prompts(tmp_path)
        source = {"kind": "jsonl", "path": str(tmp_path / "in"), "span_max_rows": 4}
        config = job(source, tmp_path / "out", **{"sink": {"rows_per_file": 5}, **sections})
    delayed: list[tuple[Any, Any, list[Any]]] = []
    planned: list[Any] = []
    for _ in range(14):
        options = ResumeOptions(retry_errors=chance.random() < 0.5)
        fails = (lambda own: zlib.crc32(own.encode()) % 3 == 0) if chance.random() < 0.6 else (lambda own: False)
        act = chance.random()
        if act < 0.2:
            run(config, options, fails, num_batches=chance.randrange(4))
        elif act < 0.4:  # planned, and begun later
            planned.append(plan_of(config, options))
        elif act < 0.65:
            plan = planned.pop() if planned and chance.random() < 0.7 else plan_of(config, options)
            plan, begun = start(plan)
            batches = make_rows(plan, begun.publisher.attempt, fails)
            save(plan, begun, batches[: chance.randrange(1, 5)])
            delayed.append((plan, begun, batches))
        elif act < 0.85 and delayed:
            plan, begun, batches = delayed.pop(chance.randrange(len(delayed)))
            with contextlib.suppress(Fenced, RuntimeError):  # fenced out, or rows are missing because it was killed
                end(plan, begun)
        else:
            run(config, options, fails)
        if chance.random() < 0.15:
            (tmp_path / "out/data").mkdir(parents=True, exist_ok=True)
            (tmp_path / f"out/data/part-{chance.randrange(900, 999)}.parquet").write_bytes(b"foreign")
    run(config)
    at_rest(tmp_path / "out")


def test_newly_known_counts_and_new_files_keep_the_cached_inventory(tmp_path: Path, compared) -> None:
    def write(number: int, count: int) -> None:
        members = [(f"{row}.txt", b"x") for row in range(count)]
        (tmp_path / "in").mkdir(exist_ok=True)
        images = [(f"{row}.png", b"no image") for row in range(count)]
        pairs = [member for pair in zip(members, images, strict=True) for member in pair]
        (tmp_path / f"in/{number}.tar").write_bytes(tar_bytes(pairs))

    for number in range(4):
        write(number, 3 + number)
    source = {"kind": "webdataset", "path": str(tmp_path / "in"), "span_max_rows": 4}
    config = job(source, tmp_path / "out", sink={"rows_per_file": 2})
    plan, begun = start(plan_of(config))
    save(plan, begun, make_rows(plan, 1)[:3])  # then killed
    write(7, 5)
    plan = plan_of(config)
    assert plan.manifest.files["num_samples"].null_count
    plan, begun = start(plan)
    save(plan, begun, make_rows(plan, 2))
    assert not with_counts(plan.manifest, plan.output).files["num_samples"].null_count
    end(plan, begun)
    assert all(read < published for read, published in compared)
    assert len(at_rest(tmp_path / "out")[1]) == 3 + 4 + 5 + 6 + 5


def test_files_that_changed_are_read_again(tmp_path: Path) -> None:
    config = text_job(tmp_path, [40])
    run(config, fails=lambda own: own.endswith("7"))
    plan = plan_of(config)
    assert plan.prior is not None
    known = plan.prior.inventory

    def take() -> Inventory:
        fingerprints = resume.fingerprints_of(plan.output)
        listed = inventory.take_inventory(plan.output, plan.manifest, 1, fingerprints, known=known)
        assert state_of(listed) == state_of(inventory.take_inventory(plan.output, plan.manifest, 1, fingerprints))
        return listed

    assert take().num_files_read == 0
    [error] = (tmp_path / "out/errors").glob("*")
    [data, *_] = sorted((tmp_path / "out/data").glob("*"))
    same = error.read_bytes()
    error.unlink()
    error.write_bytes(same)
    assert take().num_files_read == 1
    error.unlink()
    assert take().num_files_read == 0
    assert take().num_rows == {DATA: 36, ERRORS: 0}
    num_data = len(list((tmp_path / "out/data").glob("*")))
    empty = data.read_bytes()
    data.unlink()
    assert take().num_files_read == num_data - 1, "rows cannot be removed from the counted results"
    data.write_bytes(empty[:-10])
    listed = take()
    assert [file.relative for file in listed.strange] == [f"data/{data.name}"]
    assert take().num_files_read == num_data - 1


def test_a_store_without_versions_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = text_job(tmp_path, [10])
    run(config)
    plan = plan_of(config)
    monkeypatch.setattr(type(plan.output), "list_versions", lambda self, folder: {})
    assert plan.prior is not None
    fingerprints = resume.fingerprints_of(plan.output)
    first = inventory.take_inventory(plan.output, plan.manifest, 1, fingerprints)
    again = inventory.take_inventory(plan.output, plan.manifest, 1, fingerprints, known=first)
    assert again.num_files_read == first.num_files_read > 0
    assert state_of(again) == state_of(first)
    assert not again.doubled
    assert len(again.accounts.done()) == 10


@pytest.mark.parametrize("folder", [DATA, ERRORS])
def test_a_file_that_appears_while_an_inventory_is_taken_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    config = text_job(tmp_path, [40])
    run(config, fails=lambda own: own.endswith("7"))
    plan = plan_of(config)
    late = sorted((tmp_path / "out" / folder).glob("*"))[-1]
    content = late.read_bytes()
    late.unlink()
    list_versions = type(plan.output).list_versions

    def listed(output: Any, listed_folder: str) -> dict[str, str]:
        versions = list_versions(output, listed_folder)
        if listed_folder == folder and not late.exists():
            late.write_bytes(content)  # another attempt publishes it after the listing
        return versions

    monkeypatch.setattr(type(plan.output), "list_versions", listed)
    fingerprints = resume.fingerprints_of(plan.output)
    first = inventory.take_inventory(plan.output, plan.manifest, 1, fingerprints)
    again = inventory.take_inventory(plan.output, plan.manifest, 1, fingerprints, known=first)
    assert state_of(again) == state_of(first)
    assert not again.doubled
    assert len(again.accounts.done()) == 40


def test_partitions_of_result_files_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PARTITION_FILES", 3)
    config = text_job(tmp_path, [40])
    run(config)
    plan = plan_of(config)
    names = list_published(plan.output, DATA)
    assert [table.relative for table in files.read_all_found(plan.output, names, ("sample_id",))] == names
    assert len(names) > 3
