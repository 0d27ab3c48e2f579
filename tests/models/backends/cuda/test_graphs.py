"""Tests that captured forwards equal eager ones for any order of sizes; fake graphs replay addresses, as CUDA's do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from decoding import Engine, Method
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import LayerSkipDrafter, ModelDrafter
from decoding.trees import StaticTree, branching_paths
from models.backends.cuda.graphs import CapturedDecoder
from models.backends.recorder import SIZES, Out
from models.kv.lanes import LaneModel, SlotBatch
from models.target import Target
from tests import toys
from tests.conformance import checks

pytestmark = pytest.mark.slow


def memory_of(leaf: Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """Notes every operation with the very tensors it read and made, and what memory of others held before."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            for leaf in given:
                if memory_of(leaf) not in self.own and memory_of(leaf) not in self.before:
                    # The whole memory, of which the tensor may be a view.
                    whole = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())
                    self.before[memory_of(leaf)] = whole, whole.clone()
        out = func(*args, **(kwargs or {}))
        read = {memory_of(leaf) for leaf in given}
        self.own |= {memory_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)} - read
        self.notes.append((func, args, kwargs or {}, out))
        return out

    def undo(self) -> None:
        """Restore the memory that the operations changed."""
        for whole, before in self.before.values():
            whole.copy_(before)


class Borrowed:
    """A tensor that a recording reads and did not make: it stays only as long as another object holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self._held = weakref.ref(tensor)

    def get(self) -> Tensor:
        tensor = self._held()
        assert tensor is not None, "a replay reads memory that was freed after the recording"
        return tensor


class TapeRecorder:
    """Replays like a CUDA graph: the same operations on the same memory, whatever it holds by then.

    Nothing of Python is run again: a value that was read from the host, or a tensor made elsewhere, stays what it was.
    The recording holds the memory of the tensors that it made, and of no other.
    """

    _depth = 0

    @property
    def is_recording(self) -> bool:
        return TapeRecorder._depth > 0

    def run_beside(self, run: Callable[[], Out]) -> Out:
        return run()

    def record(self, run: Callable[[], Out]) -> tuple[Out, Callable[[], None]]:
        TapeRecorder._depth += 1
        try:
            with Tape() as tape:
                out = run()
        finally:
            TapeRecorder._depth -= 1
            tape.undo()
        made = {id(leaf): leaf for note in tape.notes for leaf in tree_leaves(note[3]) if isinstance(leaf, Tensor)}

        def borrow(leaf: Any) -> Any:
            # A tensor without dimensions is a number of the code.
            return Borrowed(leaf) if isinstance(leaf, Tensor) and leaf.dim() and id(leaf) not in made else leaf

        def take(leaf: Any) -> Any:
            return leaf.get() if isinstance(leaf, Borrowed) else leaf

        notes = [(func, *tree_map(borrow, (args, kwargs)), old) for func, args, kwargs, old in tape.notes]
        tape.notes.clear()

        def replay() -> None:
            for func, args, kwargs, old in notes:
                args, kwargs = tree_map(take, (args, kwargs))
                new = func(*args, **kwargs)
                for before, after in zip(tree_leaves(old), tree_leaves(new), strict=True):
                    if isinstance(before, Tensor) and before.data_ptr() != after.data_ptr():
                        before.copy_(after)

        # Emptied, because a recording does no work.
        emptied = {memory_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)} & tape.own
        for leaf in made.values():
            if memory_of(leaf) in emptied:
                leaf.zero_()
        return out, replay


def captured(model: Target) -> CapturedDecoder:
    """Let the model's memory be served by recordings."""
    run = CapturedDecoder(model.decoder, TapeRecorder())

    def lanes(
        num_slots: int,
        num_lanes: int,
        capacity: int,
        feature_layers: Sequence[int] = (),
        num_pages: int | None = None,
    ) -> LaneModel:
        return LaneModel(model.decoder, model.head, num_slots, num_lanes, capacity, run, feature_layers, num_pages)

    model.lanes = lanes  # type: ignore[method-assign]
    return run


def decode_all(family: str, slots: int, wraps: bool) -> tuple[dict[str, Any], list[int]]:
    """A pair's answers to nine requests, more than there are slots, so that batches shrink and slots are refilled; and
    how many recordings target and drafter made."""
    target, drafter = toys.target(family), toys.perturbed(family, 0.02)
    runs = [captured(model) for model in (target, drafter)] if wraps else []
    method = Method(ModelDrafter(drafter, [Full()], toys.VOCAB_SIZE), StaticTree(branching_paths([2, 2])), Exact())
    engine = Engine(target, method, slots, 128)
    done = checks.run(engine, checks.requests(family, 9))
    # Recordings go with the memory that they were made over.
    counts = [run.num_recordings for run in runs]
    del engine, method
    gc.collect()
    assert [run.num_recordings for run in runs] == [0] * len(runs)
    return {
        key: (completion.token_ids, completion.telemetry.acceptance_histogram) for key, completion in done.items()
    }, counts


@pytest.mark.parametrize(("family", "slots"), [("llava", 5), ("llava", 1), ("qwen2_5_vl", 3)])
def test_a_captured_pair_gives_the_output_of_the_eager_pair(family: str, slots: int) -> None:
    expected, _ = decode_all(family, slots, False)
    got, counts = decode_all(family, slots, True)
    assert got == expected
    # A handful of sizes, though every batch from one row to all occurred.
    sizes = len([rows for rows in SIZES if rows <= 8])
    assert all(0 < count <= 3 * sizes for count in counts), counts


def test_an_input_that_is_freed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the positions to write are freed after the capture."""
    record = CapturedDecoder._record

    def with_freed(self: CapturedDecoder, *given: Any) -> Any:
        recording = record(self, *given)
        object.__setattr__(recording.inputs, "offsets", recording.inputs.offsets.clone())
        return recording

    monkeypatch.setattr(CapturedDecoder, "_record", with_freed)
    with pytest.raises(AssertionError, match="freed after the recording"):
        decode_all("llava", 3, True)


@pytest.mark.parametrize("part", ["embeds", "positions", "offsets", "mask"])
def test_an_input_that_is_not_copied_into_its_buffer_is_caught(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a recording uses the buffer's content at capture time."""
    expected, _ = decode_all("llava", 3, False)
    record, held = CapturedDecoder._record, []

    def with_stale(self: CapturedDecoder, *given: Any) -> Any:
        recording = record(self, *given)
        held.append(getattr(recording.inputs, part))
        object.__setattr__(recording.inputs, part, held[-1].clone())
        return recording

    monkeypatch.setattr(CapturedDecoder, "_record", with_stale)
    got, _ = decode_all("llava", 3, True)
    assert got != expected


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_some_of_the_layers_are_captured_on_their_own_over_the_same_cache(family: str) -> None:
    results, runs = [], []
    for wraps in (False, True):
        target = toys.target(family)
        whole = captured(target) if wraps else None
        drafter = LayerSkipDrafter([1])
        engine = Engine(target, Method(drafter, StaticTree(branching_paths([2, 2])), Exact()), 3, 128)
        done = checks.run(engine, checks.requests(family, 9))
        results.append(
            {key: (completion.token_ids, completion.telemetry.acceptance_histogram) for key, completion in done.items()}
        )
        runs += [whole, drafter._runner]
    assert results[0] == results[1]
    assert all(isinstance(run, CapturedDecoder) and run.num_recordings > 0 for run in runs[2:])


def batch(num_slots: int) -> SlotBatch:
    return SlotBatch(torch.arange(num_slots), tuple(range(num_slots)), (1,) * num_slots)


@pytest.mark.parametrize("is_faulty", [False, True])
def test_an_unused_row_does_not_write_the_kv_cache(is_faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots of four decode, in a recording of four rows. The planted fault: the fourth row writes where it last
    wrote."""
    target = toys.target("llava")
    captured(target)
    lanes = target.lanes(4, 1, 64)
    requests = checks.requests("llava", 4)
    depth = torch.arange(3).expand(4, -1)
    visible = torch.ones(3, 3, dtype=torch.bool).tril().expand(4, -1, -1)
    with torch.inference_mode():
        lanes.admit(batch(4), [[target.encode(request.prompt, request.images, request.videos)] for request in requests])
        lanes.forward(batch(4), torch.full((4, 3), 7), depth, visible)
        for memory in lanes.cache.keys:
            assert memory is not None
            memory[3] += 1.0  # another sample has moved in
        before = [memory[3, :, :64].clone() for memory in lanes.cache.keys if memory is not None]
        fill = Tensor.fill_
        if is_faulty:
            monkeypatch.setattr(Tensor, "fill_", lambda self, value: fill(self, value) if value < 0 else self)
        lanes.forward(batch(3), torch.full((3, 3), 9), depth[:3], visible[:3])
        after = [memory[3, :, :64] for memory in lanes.cache.keys if memory is not None]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)) is not is_faulty


def test_batches_with_more_rows_than_any_captured_graph_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.backends.cuda.graphs.SIZES", (1, 2))
    expected, _ = decode_all("llava", 3, False)
    got, counts = decode_all("llava", 3, True)
    assert got == expected
    assert all(count > 0 for count in counts)


class Refuses(TapeRecorder):
    """A recorder of a model that cannot be captured, such as one that chooses experts on the host."""

    def record(self, run: Callable[[], Out]) -> tuple[Out, Callable[[], None]]:
        raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture\nadvice")


def test_a_model_that_cannot_be_captured_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = decode_all("qwen3_vl_moe", 3, False)
    monkeypatch.setattr("tests.models.backends.cuda.test_graphs.TapeRecorder", Refuses)
    got, counts = decode_all("qwen3_vl_moe", 3, True)
    assert got == expected
    assert counts == [0, 0]
    # Once for each model, without the advice.
    assert [record.message.splitlines() for record in caplog.records] == [
        [
            "steps run eagerly, which is slower: this model cannot be captured: "
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture"
        ]
    ] * 2
    run = CapturedDecoder(toys.target("llava").decoder, Refuses())
    run._has_failed = True
    assert run.mode == "eager, capturing failed"


def test_out_of_memory_in_a_capture_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(self: Refuses, run: Callable[[], Tensor]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Refuses, "record", exhausted)
    monkeypatch.setattr("tests.models.backends.cuda.test_graphs.TapeRecorder", Refuses)
    with pytest.raises(torch.OutOfMemoryError):
        decode_all("llava", 3, True)
