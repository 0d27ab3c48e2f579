"""EAGLE-3 heads: networks equal recorded outputs of the public code, and files of all formats are read or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decoding.acceptance import Exact
from decoding.contracts import EngineSpec, Method, PrefillOutput, StepNoise
from decoding.drafters import EagleDrafter, ParallelEagleDrafter
from decoding.noise import Noise
from decoding.sampling import RowSampling
from decoding.step import grow_tree
from decoding.tree import DraftTree, Frontier
from decoding.trees import DynamicTree
from models.heads.eagle3 import Eagle3Network
from models.heads.formats import EAGLE3
from models.heads.loader import load_head, read_shape, read_verifier
from models.heads.writer import save_eagle3
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch
from models.loading.checkpoints import CheckpointError, CheckpointRef

RECORDED = Path(__file__).parent / "recorded"
CASES = sorted(path.name for path in RECORDED.glob("eagle3*"))
TREES = ("eagle3", "eagle3_narrow")
NUM_LAYERS, VOCAB = 8, 64
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
NOTHING: frozenset[int] = frozenset()


def load(case: str, folder: Path | None = None) -> tuple[Eagle3Network, dict[str, Tensor]]:
    recorded = load_file(RECORDED / case / "recorded.safetensors")
    embedding = recorded.get("target.embed_tokens", torch.zeros(VOCAB, 1))
    ref = CheckpointRef(str(folder or RECORDED / case))
    return load_head(EAGLE3, ref, "float32", CPU, NUM_LAYERS, embedding), recorded


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_the_public_code(case: str) -> None:
    network, recorded = load(case)
    with torch.no_grad():
        states = network.project(recorded["features"])
        torch.testing.assert_close(states, recorded["pairs.projected"], **CLOSE)
        pairs = network.fuse(network.embed_tokens(recorded["tokens"][1:]), states)
        outputs = network(pairs[None], recorded["positions"][..., None, :]).last_hidden_state
        logits = network.output_layer(VOCAB)(outputs)[0]
    torch.testing.assert_close(logits[:, network.token_ids], recorded["pairs.logits"], **CLOSE)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[network.token_ids] = False
    assert bool((logits[:, outside] == -torch.inf).all())


def opened(network: Eagle3Network, recorded: dict[str, Tensor], tree: DynamicTree) -> tuple[EagleDrafter, SlotBatch]:
    """A drafter over the recorded prompt."""
    make = EagleDrafter if network.shape.mask_token_id is None else ParallelEagleDrafter
    drafter = make(network, network.output_layer(VOCAB))
    sizes = (tree.max_frontier_nodes, tree.max_grown_nodes, tree.max_levels)
    drafter.open(EngineSpec(1, 64, VOCAB, 32, CPU, NOTHING, NOTHING, *sizes))
    slots = SlotBatch(torch.zeros(1, dtype=torch.long), (0,), (1,))
    tokens = recorded["tokens"]
    prompt = Prefix(tokens[:-1], torch.zeros(len(tokens) - 1, 32), recorded["positions"], tokens[:-1] < 0)
    drafter.admit(slots, tokens[-1:], [PrefillOutput(prompt, features=recorded["features"][None])])
    drafter.prefill(slots, [[]])
    return drafter, slots


@pytest.mark.parametrize("case", CASES)
def test_a_drafted_chain_equals_the_public_code(case: str) -> None:
    """Each drafted token is fed back with the state that the public code feeds back."""
    network, recorded = load(case)
    drafter, slots = opened(network, recorded, DynamicTree(1, 5, 6))
    frontier = Frontier.at_root(recorded["tokens"][-1:])
    expected = torch.cat([recorded["pairs.logits"][-1:], recorded["chain.logits"]])
    with torch.no_grad():
        for depth, token in enumerate(recorded["chain.tokens"]):
            logits = drafter.draft(slots, frontier)[0, 0]
            torch.testing.assert_close(logits[network.token_ids], expected[depth], **CLOSE)
            assert int(logits.argmax()) == int(token)
            node, above = torch.full((1, 1), depth + 1), torch.zeros(1, 1, dtype=torch.long)
            frontier = frontier.below(node, node - 1, token.view(1, 1), above)


def paths(tokens: Tensor, parents: Tensor) -> set[tuple[int, ...]]:
    lines: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        lines.append((*lines[parent], token) if parent >= 0 else ())
    return set(lines)


def grown(drafter: EagleDrafter, policy: DynamicTree, slots: SlotBatch, root: Tensor) -> DraftTree:
    ones, zeros = torch.ones(1), torch.zeros(1, dtype=torch.long)
    rows = RowSampling(zeros.float(), zeros, ones, ones, None, False, 0, False)
    noise = StepNoise(Noise(torch.zeros(1, 2, dtype=torch.long), zeros), policy.max_levels + 1, VOCAB)
    method = Method(drafter, policy, Exact())
    return grow_tree(method, slots, root, policy.max_levels, rows, noise, torch.full((1,), 9))


@pytest.mark.parametrize("case", TREES)
def test_trees_of_two_rounds_equal_the_public_code(case: str) -> None:
    network, recorded = load(case)
    policy = DynamicTree(3, int(recorded["tree.depths"].max()) - 1, len(recorded["tree.tokens"]))
    drafter, slots = opened(network, recorded, policy)
    with torch.no_grad():
        tree = grown(drafter, policy, slots, recorded["tokens"][-1:])
        assert paths(tree.tokens[0], tree.parents[0]) == paths(recorded["tree.tokens"], recorded["tree.parents"])
        # Three tokens are accepted, with the target's features.
        accepted = recorded["round.tokens"][len(recorded["tokens"]) :][None]
        states = network.project(recorded["round.features"])[None, None]
        drafter._encode(slots, accepted, states, torch.tensor([accepted.shape[1]]))
        tree = grown(drafter, policy, slots, recorded["round.tokens"][-1:])
    expected = paths(recorded["round.tree.tokens"], recorded["round.tree.parents"])
    assert paths(tree.tokens[0], tree.parents[0]) == expected


@pytest.mark.parametrize("case", CASES)
def test_a_head_is_written_in_the_format_of_speculators(case: str, tmp_path: Path) -> None:
    network, _ = load(case)
    save_eagle3(network, tmp_path, "some/target", ("LlamaForCausalLM",), 5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert read_verifier(CheckpointRef(str(tmp_path))) == ("LlamaForCausalLM",)
    again, _ = load(case, tmp_path)
    assert again.feature_layers == network.feature_layers
    assert again.token_ids.tolist() == network.token_ids.tolist()
    assert again.shape.mrope_sections == network.shape.mrope_sections
    for (name, first), (_, other) in zip(network.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(first, other), name
    written = load_file(tmp_path / "model.safetensors")
    drafts_all = network.token_ids.tolist() == list(range(VOCAB))
    # vLLM refuses the tables of a head that drafts the whole vocabulary.
    assert ("d2t" in written) == ("t2d" in written) == (not drafts_all)
    if not drafts_all:
        assert torch.nonzero(written["t2d"]).flatten().tolist() == sorted(network.token_ids.tolist())


@pytest.mark.parametrize("case", ["eagle3_speculators", "eagle3_speculators_qwen3"])
def test_tokens_that_the_target_lacks_are_not_drafted(case: str) -> None:
    """The vocabulary of a head's file may be padded further than the output layer of the target."""
    network, recorded = load(case)
    states = recorded["pairs.hidden"]
    whole, few = network.output_layer(VOCAB)(states), network.output_layer(VOCAB - 20)(states)
    assert few.shape[-1] == VOCAB - 20
    drafted = torch.isfinite(few)
    assert torch.equal(drafted, torch.isfinite(whole[:, : VOCAB - 20]))
    assert drafted.any(0).nonzero().flatten().tolist() == [
        token for token in network.token_ids.tolist() if token < VOCAB - 20
    ]
    # Products of different widths may add up in another order.
    torch.testing.assert_close(few, whole[:, : VOCAB - 20], atol=1e-5, rtol=1e-5)


# --- files that do not fit -----------------------------------------------------------------------------------------


def changed(tmp_path: Path, case: str, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> CheckpointRef:
    """A copy of a case with other fields and tensors; None removes one."""
    folder = tmp_path / "head"
    shutil.copytree(RECORDED / case, folder)
    data = json.loads((folder / "config.json").read_text())
    for name, value in (config or {}).items():
        data[name] = value
    (folder / "config.json").write_text(json.dumps({name: value for name, value in data.items() if value is not None}))
    weights = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        key = name.replace("__", ".")
        weights.pop(key, None)
        if value is not None:
            weights[key] = value
    save_file(weights, folder / "model.safetensors")
    return CheckpointRef(str(folder))


OFFSETS = load_file(RECORDED / "eagle3_speculators" / "model.safetensors")["d2t"]


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"fc__weight": None}, "fc.weight is missing"),
        ({}, {"fc__weight": torch.zeros(32, 64)}, r"fc.weight has shape \[32, 64\] instead of \[32, 96\]"),
        ({}, {"extra__weight": torch.zeros(1)}, "extra.weight is not known"),
        ({}, {"d2t": None}, "d2t is missing"),
        ({}, {"d2t": OFFSETS + 60}, "d2t names token 6[0-9], and the vocabulary has 64 tokens|names token 1[0-9]{2}"),
        ({}, {"d2t": OFFSETS - 60}, "d2t names token -"),
        ({}, {"d2t": -torch.arange(24)}, "maps two draft tokens to one token"),
        ({}, {"d2t": OFFSETS.float()}, "must hold whole numbers"),
        ({}, {"d2t": OFFSETS[:20]}, r"d2t has shape \[20\] instead of \[24\]"),
        ({}, {"norm__weight": torch.full((32,), torch.nan)}, "norm.weight has values that are not finite"),
        ({}, {"lm_head__weight": torch.full((24, 32), torch.inf)}, "not finite; the file is damaged"),
        ({"draft_vocab_size": 65}, {}, "draft_vocab_size is 65, above vocab_size 64"),
        ({"draft_vocab_size": "24"}, {}, "must give draft_vocab_size as a positive whole number"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, {}, "names the target's state 9, and the target has 8"),
        ({"eagle_aux_hidden_state_layer_ids": []}, {}, "must list 1 to 16 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}, "fc.weight has shape"),
        ({"norm_before_fc": True, "fc_norm": True}, {}, "exclude each other"),
        ({"norm_output": "yes"}, {}, "norm_output must be true or false"),
        ({"speculators_model_type": "dflash"}, {}, "is 'dflash', which is no EAGLE-3 head"),
        ({"target_hidden_size": 48}, {}, r"fc.weight has shape \[32, 96\] instead of \[32, 144\]"),
    ],
)
def test_a_bad_file_is_refused_before_its_network_is_made(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    ref = changed(tmp_path, "eagle3_speculators", config, **tensors)
    with pytest.raises(CheckpointError, match=message):
        read_shape(EAGLE3, ref, NUM_LAYERS)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' are not known"),
        ({"hidden_size": 0}, "must give hidden_size as a positive whole number"),
        ({"num_hidden_layers": 17}, "17 layers are above the limit of 16"),
        ({"layer_types": ["sliding_attention"]}, "sliding attention"),
        ({"rope_parameters": {"rope_type": "mrope", "mrope_section": [1, 1, 1]}}, "does not add up to half"),
        ({"rope_parameters": {"mrope_section": [2, 2], "mrope_interleaved": True}}, "needs an mrope_section of three"),
        ({"rope_parameters": {"mrope_section": [2, 1, 1], "mrope_interleaved": 1}}, "must be true or false"),
    ],
)
def test_layers_that_are_not_supported_are_refused(tmp_path: Path, layers: dict[str, Any], message: str) -> None:
    config = json.loads((RECORDED / "eagle3_speculators" / "config.json").read_text())["transformer_layer_config"]
    ref = changed(tmp_path, "eagle3_speculators", {"transformer_layer_config": config | layers})
    with pytest.raises(CheckpointError, match=message):
        read_shape(EAGLE3, ref, NUM_LAYERS)


def test_layer_ids_follow_the_format(tmp_path: Path) -> None:
    """The same key counts states in files of speculators, and layers in the `eagle_config` of SpecForge."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    inner = changed(tmp_path / "inner", "eagle3_specforge", {"eagle_config": ids})
    assert read_shape(EAGLE3, inner, NUM_LAYERS).feature_layers == (2, 4, 5)
    outer = changed(tmp_path / "outer", "eagle3_speculators", ids)
    assert read_shape(EAGLE3, outer, NUM_LAYERS).feature_layers == (1, 3, 4)
    none = changed(tmp_path / "none", "eagle3_speculators", {"eagle_aux_hidden_state_layer_ids": None})
    assert read_shape(EAGLE3, none, 28).feature_layers == (2, 14, 25)


def test_a_file_without_an_embedding_needs_one_that_fits(tmp_path: Path) -> None:
    ref = changed(tmp_path, "eagle3_speculators", embed_tokens__weight=None)
    for embedding in (torch.zeros(VOCAB, 16), torch.zeros(VOCAB - 1, 32)):
        with pytest.raises(CheckpointError, match=r"no embed_tokens.weight, and the target's embedding"):
            load_head(EAGLE3, ref, "float32", CPU, NUM_LAYERS, embedding)


class Payload:
    """Pickles to a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    ref = changed(tmp_path, "eagle3_speculators")
    folder, mark = Path(ref.path), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Payload(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="tensors only, no other pickled objects"):
        read_shape(EAGLE3, ref, NUM_LAYERS)
    assert not mark.exists()
