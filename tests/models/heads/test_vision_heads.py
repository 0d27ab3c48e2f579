"""ViSpec and MSD heads: networks and drafters equal recorded outputs of the public code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decoding.contracts import EngineSpec, PrefillOutput
from decoding.drafters import EagleDrafter
from decoding.tree import Frontier
from decoding.trees import Chain
from models.heads.eagle import EagleNetwork
from models.heads.formats import FORMATS
from models.heads.loader import load_head
from models.heads.vision import VisionKind, VispecNetwork
from models.inputs.prefix import Prefix, visual_runs
from models.kv.lanes import SlotBatch
from models.loading.checkpoints import CheckpointRef

RECORDED = Path(__file__).parent / "recorded"
CASES = ("vispec_qwen", "vispec_llava", "msd_llava", "msd_qwen")
VOCAB, HIDDEN = 64, 32
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
NOTHING: frozenset[int] = frozenset()


def kind_of(case: str) -> VisionKind:
    return "vispec" if case.startswith("vispec") else "msd"


def load(case: str, folder: Path | None = None) -> tuple[EagleNetwork, dict[str, Tensor]]:
    ref = CheckpointRef(str(folder or RECORDED / case))
    network = load_head(FORMATS[kind_of(case)], ref, "float32", CPU, 0, torch.zeros(1, 1))
    return network, load_file(RECORDED / case / "recorded.safetensors")


def shifted(network: EagleNetwork, tokens: Tensor, embeds: Tensor, visual: Tensor) -> Prefix:
    """Tokens 1 to L with their embeddings, of which the last token is text."""
    last = network.embed_tokens(tokens[-1:])
    marks = torch.cat([visual[1:], visual.new_zeros(1)])
    return Prefix(tokens[1:], torch.cat([embeds[1:], last]), torch.arange(len(tokens) - 1), marks)


def run(network: EagleNetwork, pairs: Prefix) -> Tensor:
    hidden: Tensor = network(pairs.embeds[None], pairs.positions[None]).last_hidden_state[0]
    return hidden


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_network_computes_the_recorded_pairs(case: str) -> None:
    network, recorded = load(case)
    prompt = shifted(network, recorded["tokens"], recorded["embeds"], recorded["visual"])
    pairs, summary = network.pair(prompt, recorded["features"])
    hidden = run(network, pairs)
    if case.startswith("vispec"):
        torch.testing.assert_close(pairs.embeds, recorded["compressed.inputs"], **CLOSE)
        assert pairs.positions.tolist() == recorded["compressed.positions"].tolist()
        torch.testing.assert_close(summary, recorded["image.adapted"][-1], **CLOSE)
        torch.testing.assert_close(hidden, recorded["pairs.hidden"][pairs.positions], **CLOSE)
    else:
        torch.testing.assert_close(pairs.embeds, recorded["pairs.inputs"], **CLOSE)
        assert summary.shape == (0,)
        torch.testing.assert_close(hidden, recorded["pairs.hidden"], **CLOSE)
    logits = hidden @ recorded["target.lm_head"].T
    torch.testing.assert_close(logits, recorded["pairs.logits"][pairs.positions], **CLOSE)
    assert not bool(pairs.visual.any())


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("vispec")])
def test_a_prompt_without_an_image_has_a_state_of_zeros(case: str) -> None:
    network, recorded = load(case)
    tokens, features = recorded["text.tokens"], recorded["text.features"]
    embeds = network.embed_tokens(tokens[:-1])
    pairs, summary = network.pair(shifted(network, tokens, embeds, tokens[:-1] < 0), features)
    assert not bool(summary.any())
    torch.testing.assert_close(run(network, pairs), recorded["text.hidden"], **CLOSE)


def opened(case: str, others: int = 0) -> tuple[EagleDrafter, SlotBatch, dict[str, Tensor]]:
    """A drafter over the recorded prompt in its last slot, after `others` prompts without images."""
    network, recorded = load(case)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    head.weight.copy_(recorded["target.lm_head"])
    drafter = EagleDrafter(network, head)
    count, tree = 1 + others, Chain(5)
    sizes = (tree.max_frontier_nodes, tree.max_grown_nodes, tree.max_levels)
    drafter.open(EngineSpec(count, 64, VOCAB, HIDDEN, CPU, NOTHING, NOTHING, *sizes))
    slots = SlotBatch(torch.arange(count), tuple(range(count)), (1,) * count)
    tokens = recorded["tokens"]
    length = len(tokens) - 1
    generator = torch.Generator().manual_seed(1)
    prefill_outputs = []
    for _ in range(others):
        rows, features = torch.randn(2, length, HIDDEN, generator=generator)
        ids = torch.randint(VOCAB, (length,), generator=generator)
        prefill_outputs.append(PrefillOutput(Prefix(ids, rows, torch.arange(length), ids < 0), features=features[None]))
    # The target's positions differ from those of the pairs, as with three rotary axes.
    own = Prefix(tokens[:-1], recorded["embeds"], torch.zeros(3, length).long(), recorded["visual"])
    prefill_outputs.append(PrefillOutput(own, features=recorded["features"][None]))
    drafter.admit(slots, tokens[-1:].expand(count), prefill_outputs)
    drafter.prefill(slots, [[] for _ in prefill_outputs])
    return drafter, slots, recorded


@torch.no_grad()
@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_drafter_computes_the_recorded_chain_and_second_round(case: str, others: int) -> None:
    drafter, slots, recorded = opened(case, others)
    count = 1 + others
    torch.testing.assert_close(drafter._output[others, 0], recorded["pairs.hidden"][-1], **CLOSE)
    frontier = Frontier.at_root(recorded["tokens"][-1:].expand(count))
    expected = torch.cat([recorded["pairs.logits"][-1:], recorded["chain.logits"]])
    for depth, token in enumerate(recorded["chain.tokens"]):
        logits = drafter.draft(slots, frontier)[others, 0]
        torch.testing.assert_close(logits, expected[depth], **CLOSE)
        assert int(logits.argmax()) == int(token)
        node = torch.full((count, 1), depth + 1)
        frontier = frontier.below(node, node - 1, token.expand(count, 1), torch.zeros(count, 1, dtype=torch.long))
    # The accepted tokens have the target's features, and replace the chain.
    later = recorded["round.tokens"][len(recorded["tokens"]) :].expand(count, -1)
    features = recorded["round.features"].expand(count, 1, -1, -1)
    drafter._encode(slots, later, features, torch.full((count,), later.shape[1]))
    torch.testing.assert_close(drafter._output[others, 0], recorded["round.hidden"][-1], **CLOSE)
    root = drafter.draft(slots, Frontier.at_root(recorded["round.tokens"][-1:].expand(count)))[others, 0]
    torch.testing.assert_close(root, recorded["round.hidden"][-1] @ recorded["target.lm_head"].T, **CLOSE)


@torch.no_grad()
def test_the_state_of_an_image_is_removed_with_its_sample() -> None:
    """A slot that had an image drafts for a text as a fresh slot does."""
    drafter, slots, recorded = opened("vispec_llava")
    tokens, features = recorded["text.tokens"], recorded["text.features"]
    embeds = drafter.network.embed_tokens(tokens[:-1])
    prefix = Prefix(tokens[:-1], embeds, torch.arange(len(tokens) - 1), tokens[:-1] < 0)
    assert bool(drafter._summaries.any())
    drafter.admit(slots, tokens[-1:], [PrefillOutput(prefix, features=features[None])])
    drafter.prefill(slots, [[]])
    torch.testing.assert_close(drafter._output[0, 0], recorded["text.hidden"][-1], **CLOSE)
    drafter._encode(slots, tokens[None, :2], features[None, None, :2], torch.tensor([2]))
    fresh, fresh_slots, _ = opened("vispec_llava")
    fresh._summaries.zero_()
    fresh.admit(fresh_slots, tokens[-1:], [PrefillOutput(prefix, features=features[None])])
    fresh.prefill(fresh_slots, [[]])
    fresh._encode(fresh_slots, tokens[None, :2], features[None, None, :2], torch.tensor([2]))
    torch.testing.assert_close(drafter._output, fresh._output)
    assert not bool(drafter._summaries.any())


def images(num_queries: int, marks: str) -> tuple[VispecNetwork, Prefix, Tensor]:
    """A head with `num_queries` queries, and a prompt whose visual tokens are those of `marks` with an "i"."""
    network, _ = load("vispec_llava")
    assert isinstance(network, VispecNetwork)
    generator = torch.Generator().manual_seed(4)
    network.imadpt.q = torch.nn.Parameter(torch.randn(num_queries, 4, 8, generator=generator), requires_grad=False)
    rows, features = torch.randn(2, len(marks), HIDDEN, generator=generator)
    visual = torch.tensor([mark == "i" for mark in marks])
    return network, Prefix(torch.arange(len(marks)), rows, torch.arange(len(marks)), visual), features


@torch.no_grad()
def test_every_image_is_compressed_and_later_texts_read_the_last_one() -> None:
    network, prompt, features = images(3, "tiiiittiiit")
    pairs, summary = network.pair(prompt, features)
    first, second = network.imadpt(prompt.embeds[1:5]), network.imadpt(prompt.embeds[7:10])
    states = {0: None, 5: first[-1], 6: first[-1], 10: second[-1]}
    expected = {
        position: network.fuse(prompt.embeds[position], features[position], state) for position, state in states.items()
    }
    expected |= {3: first[0], 4: first[1], 8: second[0], 9: second[1]}
    assert pairs.positions.tolist() == pairs.token_ids.tolist() == sorted(expected)
    torch.testing.assert_close(pairs.embeds, torch.stack([expected[index] for index in sorted(expected)]))
    assert torch.equal(summary, second[-1])


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_queries", "marks", "positions"),
    [
        (1, "tiit", [0, 3]),  # only the state of the image is left
        (3, "tiit", [0, 1, 2, 3]),
        (4, "tiit", [0, 1, 2, 3]),  # the image is shorter than the rows of the adaptor
        (4, "iit", [0, 1, 2]),
        (3, "tit", [0, 1, 2]),
        (2, "iiit", [2, 3]),
        (2, "t", [0]),
    ],
)
def test_a_prompt_never_grows(num_queries: int, marks: str, positions: list[int]) -> None:
    network, prompt, features = images(num_queries, marks)
    pairs, _ = network.pair(prompt, features)
    assert pairs.positions.tolist() == positions
    assert pairs.length == len(positions)
    for start, end in visual_runs(prompt.visual):
        rows = [index for index, position in enumerate(positions) if start <= position < end]
        adapted = network.imadpt(prompt.embeds[start:end])[: len(rows)]
        torch.testing.assert_close(pairs.embeds[rows], adapted)


@torch.no_grad()
def test_features_of_image_tokens_do_not_change_their_rows() -> None:
    for case in ("vispec_llava", "msd_qwen"):
        network, recorded = load(case)
        prompt = shifted(network, recorded["tokens"], recorded["embeds"], recorded["visual"])
        other = torch.where(prompt.visual[:, None], torch.nan, recorded["features"])
        pairs, summary = network.pair(prompt, recorded["features"])
        same, same_summary = network.pair(prompt, other)
        assert torch.equal(pairs.embeds, same.embeds)
        assert torch.equal(summary, same_summary)
