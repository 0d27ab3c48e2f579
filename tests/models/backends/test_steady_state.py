"""Tests that a compiled pair does not recompile after warm-up when depths and batch sizes change."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from models.backends.cpu import layer_graph
from models.backends.cpu.layer_graph import LayerGraph
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests.conformance.erratic import Erratic
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_prompts

# Importing torch's own compiler warns of a part of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.slow,
]

DEPTHS = (4, 0, 1, 0, 0, 3, 2, 4, 0, 4)
KINDS = 6
"""Prompts of one row and of several; steps of one row or several, with one node or several."""


def test_a_repeated_pass_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    made: list[weakref.ref[LayerGraph]] = []
    compile_graph = layer_graph._compile

    def counted(owner: weakref.ref[LayerGraph], *arguments: Any) -> Any:
        made.append(owner)
        return compile_graph(owner, *arguments)

    monkeypatch.setattr(layer_graph, "_compile", counted)
    target, drafter = (
        Target.load(CheckpointRef(str(CHECKPOINTS / name)), "float32", "cpu")
        for name in ("text_target", "text_drafter")
    )
    assert target.compile()
    assert drafter.compile()
    method = Method(
        ModelDrafter(drafter, [Full()], target.vocab_size), Chain(max(DEPTHS)), Exact(), controller=Erratic(0, DEPTHS)
    )
    engine = Engine(target, method, 3, 160)
    # Outputs of many lengths: slots fall free one by one, and at the end the batch drains down to one row.
    requests = [
        Request(str(number), prompt, sampling=Sampling(max_new_tokens=5 + 4 * number))
        for number, prompt in enumerate(held_out_prompts(7, 0))
    ]
    passes = []
    for _ in range(3):
        before = len(made)
        done = {completion.sample_id: completion.token_ids for completion in engine.run(requests)}
        passes.append((len(made) - before, done))
    assert passes[0][0] > 0
    assert passes[2][0] == 0, "the third pass compiled"
    assert all(made.count(graph) <= KINDS for graph in set(made))
    assert passes[2][1] == passes[0][1]
    torch._dynamo.reset()
