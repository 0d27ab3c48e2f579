"""Processors at tree nodes do what transformers' logits processors do for the text before each node, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import decoding.processors
from decoding.reference import processors_of
from decoding.sampling import process_logits
from decoding.scheduling.processors import ProcessorTables
from decoding.scheduling.slots import RequestState, SlotTable
from decoding.tree import NO_TOKEN, DraftTree
from decoding.types import Request, Sampling
from models.inputs.prefix import Prefix
from tests.decoding import blocks

V = 9
EOS = frozenset([2, 5])
TREE = [-1, 0, 0, 1, 1, 2, 3]
EARLIER = Sampling(no_repeat_ngram_size=3, suppress_tokens=(1,), min_new_tokens=12, bad_words_ids=((8, 8), (0,)))

token = st.integers(0, V - 1)
words = st.lists(token, min_size=1, max_size=4).map(tuple)
# transformers refuses lists of bad words in which all are EOS.
bad_words = st.lists(words, max_size=4, unique=True).map(lambda lists: (*lists, (4, 4, 4, 4)))
SAMPLINGS = st.builds(
    Sampling,
    max_new_tokens=st.integers(8, 14),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    no_repeat_ngram_size=st.integers(0, 4),
    bad_words_ids=st.just(()) | bad_words,
    sequence_bias=st.lists(st.tuples(words, st.floats(-3, 3, width=32)), max_size=4, unique_by=lambda p: p[0]).map(
        tuple
    ),
    suppress_tokens=st.lists(st.integers(0, V + 3), max_size=3).map(tuple),
    begin_suppress_tokens=st.lists(token, max_size=3).map(tuple),
    min_new_tokens=st.integers(0, 9),
    min_length=st.integers(0, 16),
    forced_bos_token_id=st.none() | token,
    forced_eos_token_id=st.lists(token, max_size=2, unique=True).map(tuple),
    ignore_eos=st.booleans(),
)
ROWS = st.lists(
    st.tuples(SAMPLINGS, st.lists(token, min_size=1, max_size=9), st.integers(0, 7)), min_size=1, max_size=3
)


def occupied(table: SlotTable, rows: list[tuple[Sampling, list[int], int]], seed: int) -> list[list[int]]:
    """Fill the slots; return the text of each row, with its random output, which is written in steps of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for slot, (sampling, prompt, num_new) in enumerate(rows):
        ids = torch.tensor(prompt)
        prefix = Prefix(ids, torch.zeros(len(prompt), 1), torch.arange(len(prompt)), ids < 0)
        table.occupy([slot], [RequestState(Request(f"{slot}", "", (), sampling), len(prompt), 0)], [prefix])
        output = torch.randint(0, V, (num_new + 1,), generator=generator)
        slots = table.batch([slot])
        for start in range(0, num_new, 2):
            # The second token of the last step may be a rejected draft.
            count = min(2, num_new - start)
            table.advance(slots, output[None, start : start + 2], torch.tensor([count]))
        texts.append([*prompt, *output[:num_new].tolist()])
    return texts


def expected(sampling: Sampling, num_prompt: int, text: list[int], logits: Tensor) -> Tensor:
    return processors_of(sampling, num_prompt, EOS)(torch.tensor([text]), logits[None].clone())[0]


def check(rows: list[tuple[Sampling, list[int], int]], seed: int) -> None:
    """Compare all nodes of random trees; the slots had other requests before."""
    table = SlotTable(4, V, torch.device("cpu"), EOS)
    occupied(table, [(EARLIER, [3, 4, 3, 4], 3)] * 3, seed + 1)
    for slot in range(3):
        table.release(slot)
    texts = occupied(table, rows, seed)
    slots = table.batch(range(len(rows)))
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, V, (len(rows), len(TREE)), generator=generator)
    tree = blocks.tree(drafts.tolist(), TREE)
    logits = torch.randn(len(rows), len(TREE), V, generator=generator)
    got = process_logits(logits, table.sampling(slots), tree.paths())
    for row, (sampling, prompt, _) in enumerate(rows):
        for node in range(len(TREE)):
            path: list[int] = []
            above = node
            while above > 0:
                path.insert(0, int(drafts[row, above]))
                above = TREE[above]
            wanted = expected(sampling, len(prompt), [*texts[row], *path], logits[row, node])
            torch.testing.assert_close(got[row, node], wanted)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 10_000), st.sampled_from([1 << 24, 20]))
def test_logits_of_every_node_are_processed_as_in_transformers(
    rows: list[tuple[Sampling, list[int], int]], seed: int, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding.processors, "CHUNK_ENTRIES", chunk)
        check(rows, seed)


Patch = pytest.MonkeyPatch
ONE_EACH = (
    Sampling(no_repeat_ngram_size=2, max_new_tokens=12),
    Sampling(bad_words_ids=((3, 4), (1, 2, 7), (6,)), max_new_tokens=12),
    Sampling(sequence_bias=(((3, 4), 2.0), ((1,), -1.5)), max_new_tokens=12),
    Sampling(begin_suppress_tokens=(1, 3, 4), max_new_tokens=12),
    Sampling(min_new_tokens=4, max_new_tokens=12),
    Sampling(min_length=9, max_new_tokens=12),
    Sampling(forced_eos_token_id=(2, 7), suppress_tokens=(7,), max_new_tokens=6),
    Sampling(forced_bos_token_id=6, begin_suppress_tokens=(1, 3), max_new_tokens=12),
)


def check_each() -> None:
    for seed in range(12):
        for index, sampling in enumerate(ONE_EACH):
            prompt = [3] if sampling.forced_bos_token_id is not None else [3, 4, 1, 2, 7, 3][: 4 + seed % 3]
            check([(sampling, prompt, (seed + index) % 6), (Sampling(), [5, 3], 2)], seed)


def the_path_is_forgotten(patch: Patch) -> None:
    paths = DraftTree.paths
    patch.setattr(DraftTree, "paths", lambda tree: torch.full_like(paths(tree), NO_TOKEN))


def the_output_is_written_over_the_prompt(patch: Patch) -> None:
    advance = ProcessorTables.advance

    def wrong(self: ProcessorTables, *given: Any) -> None:
        lengths = self._prompt_length.clone()
        self._prompt_length.zero_()
        advance(self, *given)
        self._prompt_length.copy_(lengths)

    patch.setattr(ProcessorTables, "advance", wrong)


def a_refilled_slot_keeps_its_patterns(patch: Patch) -> None:
    put = ProcessorTables._set_patterns
    patch.setattr(
        ProcessorTables, "_set_patterns", lambda self, slot, patterns: put(self, slot, patterns) if patterns else None
    )


def suppressed_tokens_are_forced(patch: Patch) -> None:
    forced = ProcessorTables._forced_tokens

    def wrong(self: ProcessorTables, sampling: Sampling, length: int) -> Any:
        return forced(self, replace(sampling, suppress_tokens=()), length)

    patch.setattr(ProcessorTables, "_forced_tokens", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        the_path_is_forgotten,
        the_output_is_written_over_the_prompt,
        a_refilled_slot_keeps_its_patterns,
        suppressed_tokens_are_forced,
    ],
)
def test_a_planted_fault_is_caught(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check_each()
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_each()


def test_a_path_has_the_drafts_from_the_first_to_the_node() -> None:
    tree = blocks.tree([[9, 1, 2, 3, 4]], [-1, 0, 0, 1, 3])
    none = NO_TOKEN
    paths = [[none] * 3, [1, none, none], [2, none, none], [1, 3, none], [1, 3, 4]]
    assert tree.paths().tolist() == [paths]
    assert DraftTree.root_only(torch.tensor([9])).paths().shape == (1, 1, 0)


def test_placeholders_outside_of_the_output_layer_are_neither_penalised_nor_removed() -> None:
    table = SlotTable(1, V, torch.device("cpu"))
    sampling = Sampling(repetition_penalty=2.0, no_repeat_ngram_size=1, max_new_tokens=5)
    texts = occupied(table, [(sampling, [V + 4, 3, V], 1)], 0)
    logits = torch.ones(1, 1, V)
    got = process_logits(logits, table.sampling(table.batch([0])))[0, 0]
    removed = {token for token in texts[0] if token < V}
    assert [i for i in range(V) if got[i] == -torch.inf] == sorted(removed)
    assert [i for i in range(V) if got[i] == 1.0] == sorted(set(range(V)) - removed)


def test_rows_without_processors_are_not_touched() -> None:
    table = SlotTable(1, V, torch.device("cpu"), EOS)
    occupied(table, [(Sampling(), [3, 4], 2)], 0)
    rows, logits = table.sampling(table.batch([0])), torch.randn(1, 1, V)
    assert rows.processors is None
    assert process_logits(logits, rows) is logits


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5},
        {"no_repeat_ngram_size": -1},
        {"bad_words_ids": ((),)},
        {"sequence_bias": (((1,), float("inf")),)},
        {"sequence_bias": (((), 1.0),)},
        {"min_new_tokens": -1},
        {"min_length": -1},
    ],
)
def test_values_outside_their_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"sampling\.{next(iter(wrong))} must be"):
        Sampling(**wrong)
