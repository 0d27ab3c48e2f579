"""The index of finished outputs against a slow search, and the drafts that come from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.contracts import DraftLogits, PrefillOutput
from decoding.drafters import SuffixDrafter
from decoding.drafters.suffix_index import NO_KEY, SEPARATOR, Corpus, SuffixIndex, key_factors
from decoding.tree import DraftTree, Frontier
from decoding.trees import Chain
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch
from tests.decoding import blocks

Outputs = Sequence[Sequence[int]]


def slow_drafts(outputs: Outputs, ngram: Sequence[int], num_drafts: int) -> list[int]:
    """The usual continuation by its definition: follow the most frequent next token, the latest of equals."""
    ends = [
        (number, index + len(ngram))
        for number, output in enumerate(outputs)
        for index in range(len(output) - len(ngram) + 1)
        if list(output[index : index + len(ngram)]) == list(ngram)
    ]
    drafts: list[int] = []
    while len(drafts) < num_drafts:
        following: dict[int, list[tuple[int, int]]] = {}
        for number, position in ends:
            if position < len(outputs[number]):
                following.setdefault(outputs[number][position], []).append((number, position + 1))
        if not following:
            break
        token, ends = max(following.items(), key=lambda item: (len(item[1]), max(item[1])))
        drafts.append(token)
    return drafts


def indexed_drafts(index: SuffixIndex, ngram: Sequence[int], num_drafts: int) -> list[int]:
    """The drafts of an n-gram by the index; empty if it has none."""
    order = len(ngram)
    key = int(((np.array(ngram[::-1]) + 1) * key_factors(order)).sum())
    position = int(np.searchsorted(index.keys[order - 1], key))
    if position == index.keys.shape[1] or index.keys[order - 1, position] != key:
        return []
    start = int(index.starts[order - 1, position])
    following = index.text[start : start + num_drafts].tolist()
    return list(itertools.takewhile(lambda token: token != SEPARATOR, following))


def corpus_of(outputs: Outputs, max_tokens: int) -> Corpus:
    corpus = Corpus(max_tokens)
    for output in outputs:
        corpus.add(output)
    return corpus


OUTPUTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), max_size=9)


@settings(max_examples=300, deadline=None)
@given(OUTPUTS, st.integers(1, 4), st.integers(1, 6), st.integers(2, 90))
def test_every_ngram_has_its_usual_continuation(
    outputs: list[list[int]], longest: int, num_drafts: int, max_tokens: int
) -> None:
    corpus = corpus_of(outputs, max_tokens)
    kept = [output[:-1].tolist() for output in corpus._outputs]
    index = corpus.build(longest, num_drafts)
    for order in range(1, longest + 1):
        for ngram in itertools.product(range(4), repeat=order):
            assert indexed_drafts(index, ngram, num_drafts) == slow_drafts(kept, ngram, num_drafts), ngram
    for keys in index.keys:
        real = keys[keys != NO_KEY]
        assert (real[:-1] < real[1:]).all()
        assert (keys[: len(real)] == real).all(), "the padding is last"


@settings(max_examples=100, deadline=None)
@given(OUTPUTS, st.integers(2, 40))
def test_a_corpus_keeps_the_latest_outputs_that_fit(outputs: list[list[int]], max_tokens: int) -> None:
    corpus = corpus_of(outputs, max_tokens)
    cut = [output[-(max_tokens - 1) :] for output in outputs]
    kept: list[list[int]] = []
    for output in reversed(cut):
        if sum(len(finished) + 1 for finished in [*kept, output]) > max_tokens:
            break
        kept.insert(0, output)
    assert [output.tolist() for output in corpus._outputs] == [[*output, SEPARATOR] for output in kept]
    index = corpus.build(2, 2)
    assert index.text.shape == (max_tokens,)
    assert index.keys.shape == index.starts.shape == (2, max_tokens)


def test_the_worked_example_of_the_index() -> None:
    a, b, c, d, x, y = range(6)
    index = corpus_of([[a, b, c, x], [a, b, d], [a, b, c, y]], 64).build(3, 4)
    assert indexed_drafts(index, [a, b], 4) == [c, y]
    assert indexed_drafts(index, [a, b, d], 4) == []
    assert indexed_drafts(index, [x], 4) == []


def test_the_index_is_due_when_an_eighth_of_the_corpus_is_new() -> None:
    corpus = Corpus(1000)
    due = []
    for _ in range(200):
        due.append(corpus.add([1] * 9))
        if due[-1]:
            corpus.build(2, 2)
    # Of n outputs, 1, 2, … 8 are each an eighth; then every second one, and so on.
    assert due[:8] == [True] * 8
    assert due[8:17] == [False, True] * 4 + [False]
    # The corpus holds 100 outputs at most, of which 13 are an eighth.
    assert [index for index in range(120, 200) if due[index]] == list(range(120 + due[120:].index(True), 200, 13))


# --- the drafter -----------------------------------------------------------------------------------------------------


def opened(*texts: list[int], finished: Outputs = (), **options: int) -> tuple[SuffixDrafter, SlotBatch]:
    """A drafter whose slots hold the texts; the last token of each is the target's first."""
    drafter = SuffixDrafter(corpus=Corpus(options.pop("size", 512)), **options)
    drafter.open(blocks.spec(max_levels=4))
    for output in finished:
        drafter.finished(output)
    slots = blocks.slots(*range(len(texts)))
    prefill_outputs = []
    for text in texts:
        ids = torch.tensor(text[:-1])
        prefill_outputs.append(PrefillOutput(Prefix(ids, torch.zeros(len(ids), 4), torch.arange(len(ids)), ids == 0)))
    drafter.admit(slots, torch.tensor([text[-1] for text in texts]), prefill_outputs)
    return drafter, slots


def drafts(drafter: SuffixDrafter, slots: SlotBatch) -> list[list[int]]:
    """The valid drafts of a step's chains."""
    root = torch.zeros(len(slots.ids), dtype=torch.long)
    like = blocks.verification(DraftTree.root_only(root), torch.zeros(len(root), 1, blocks.VOCAB_SIZE), where=slots)
    policy = Chain(4)
    frontier: Frontier | None = policy.start(slots, root, 4, False)
    while frontier is not None:
        frontier = policy.grow(DraftLogits(drafter.draft(slots, frontier), None, like.rows))
    tree = policy.finish()
    return [row[1:][mask[1:]].tolist() for row, mask in zip(tree.tokens, tree.valid, strict=True)]


def test_the_rows_own_text_comes_first_and_a_longer_match_in_finished_outputs_replaces_it() -> None:
    finished = [[5, 6, 7, 30, 31], [6, 7, 20, 21, 22, 23, 24]]
    # One token matches in both places; the row's own continuation is taken.
    assert drafts(*opened([7, 8, 9, 7], finished=[[7, 30]])) == [[8, 9, 7, 8]]
    # Two tokens in finished outputs beat one of the row; three beat two.
    assert drafts(*opened([7, 8, 6, 7], [9, 5, 6, 7], [9, 9], finished=finished)) == [
        [20, 21, 22, 23],
        [30, 31],
        [9, 9, 9, 9],
    ]
    assert drafts(*opened([9, 5, 6, 7], finished=finished, max_ngram_tokens=2)) == [[20, 21, 22, 23]]
    assert drafts(*opened([4, 7], finished=finished, min_ngram_tokens=2)) == [[]]


def test_drafts_never_cross_the_end_of_an_output_or_a_visual_token() -> None:
    assert drafts(*opened([4, 5], finished=[[5, 6], [7, 8]])) == [[6]]
    # Token 0 is visual in these prompts: it ends the n-gram, so that only 6 is searched.
    finished = [[5, 6, 20], [6, 30], [6, 30]]
    assert drafts(*opened([5, 6], [0, 6], finished=finished)) == [[20], [30]]


def test_telemetry_counts_matches_their_length_and_their_source() -> None:
    drafter, slots = opened([7, 8, 6, 7], [9, 9], [1, 2], finished=[[6, 7, 20]])
    drafts(drafter, slots)
    assert drafter.extras(0) == {
        "suffix_match_rate": 1.0,
        "suffix_match_tokens_mean": 2.0,
        "suffix_shared_match_rate": 1.0,
    }
    assert drafter.extras(1)["suffix_match_tokens_mean"] == 1.0
    assert drafter.extras(1)["suffix_shared_match_rate"] == 0.0
    assert drafter.extras(2)["suffix_match_rate"] == 0.0
    nothing = torch.zeros(0, dtype=torch.long)
    drafter.admit(
        blocks.slots(0),
        torch.tensor([3]),
        [PrefillOutput(Prefix(nothing, nothing, nothing, nothing > 0))],
    )
    assert drafter.extras(0)["suffix_shared_match_rate"] == 0.0


def test_an_engine_that_follows_another_one_continues_with_its_outputs() -> None:
    drafter, _ = opened([4, 5], finished=[[5, 6, 7, 8], [20, 21]])
    follower = SuffixDrafter(corpus=drafter.corpus)
    follower.open(blocks.spec(max_levels=4))
    slots = blocks.slots(0)
    nothing = torch.zeros(0, dtype=torch.long)
    follower.admit(slots, torch.tensor([5]), [PrefillOutput(Prefix(nothing, torch.zeros(0, 4), nothing, nothing > 0))])
    assert drafts(follower, slots) == [[6, 7, 8]]


@pytest.mark.parametrize("size", [2, 7, 300])
def test_tensors_of_the_index_never_change_their_size(size: int) -> None:
    drafter, _ = opened([1, 2], size=size)
    tensors = (drafter._corpus_text, drafter._keys, drafter._starts)
    before = [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
    for number in range(30):
        drafter.finished([number % 7] * (1 + number % 5) + [2])
    assert [(tensor.data_ptr(), tensor.shape) for tensor in tensors] == before
