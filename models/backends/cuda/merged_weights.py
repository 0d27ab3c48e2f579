"""Merge the weights of linear layers that read the same input, so that one GEMM computes them all.

At few rows a GEMM is as fast as its weights are read, and a small matrix is read at a lower bandwidth. Merged weights
are one tensor in memory, of which the parameters of the original layers become views, so nothing is stored twice and
all other code sees unchanged values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

GROUPS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Name of a merged layer → names of its parts, which read the same input, in modules of transformers."""


class MergedPart(nn.Module):
    """Computes the outputs `start` … `stop` − 1 of a merged layer; `drop_repeated` computes all its parts at once."""

    def __init__(self, merged: nn.Linear, start: int, stop: int) -> None:
        super().__init__()
        self._whole = (merged,)  # not a submodule: the parent module has it
        self._start, self._stop = start, stop

    def forward(self, states: Tensor) -> Tensor:
        (merged,) = self._whole
        return F.linear(states, merged.weight, merged.bias)[..., self._start : self._stop]


def merge_layer(layer: nn.Module) -> Mapping[str, Tensor]:
    """Merge the weights of one layer in memory; return its parameters by their names in a merged template."""
    weights: dict[str, Tensor] = dict(layer.named_parameters())
    for path, name, members in list(_groups(layer)):
        for kind in ("weight", "bias"):
            parts = [getattr(member, kind) for member in members]
            if parts[0] is None:
                continue
            merged = torch.cat([parameter.data for parameter in parts])
            views = torch.split(merged, [len(parameter) for parameter in parts])
            for parameter, view in zip(parts, views, strict=True):
                parameter.data = view
            weights[f"{path}{name}.{kind}"] = merged
            for part in GROUPS[name]:
                del weights[f"{path}{part}.{kind}"]
    return weights


def merge_template(template: nn.Module) -> None:
    """Replace the layers of a template by parts of merged ones, whose names are those of `merge_layer`."""
    for path, name, members in list(_groups(template)):
        parent = template.get_submodule(path.removesuffix("."))
        sizes = [member.out_features for member in members]
        options = {"device": members[0].weight.device, "dtype": members[0].weight.dtype}
        merged = nn.Linear(members[0].in_features, sum(sizes), members[0].bias is not None, **options)
        parent.add_module(name, merged.requires_grad_(False))
        for index, part in enumerate(GROUPS[name]):
            parent.add_module(part, MergedPart(merged, sum(sizes[:index]), sum(sizes[: index + 1])))


def _groups(layer: nn.Module) -> Iterator[tuple[str, str, list[nn.Linear]]]:
    """Yield path of the parent module, name of the merged layer, and its parts, for all groups that can be merged."""
    for path, parent in layer.named_modules():
        for name, group in GROUPS.items():
            members = [getattr(parent, part, None) for part in group]
            if _can_merge(members):
                yield path + "." if path else "", name, members  # type: ignore[misc]


def _can_merge(members: Sequence[object]) -> bool:
    """Return whether these are plain linear layers, not rounded or adapted ones, of equal inputs and dtypes."""
    kinds = set()
    for member in members:
        if type(member) is not nn.Linear or member._forward_hooks or member._forward_pre_hooks:
            return False
        parts = [part for part in (member.weight, member.bias) if part is not None]
        if any(type(part.data) is not Tensor for part in parts):
            return False
        kinds.add((member.in_features, len(parts), *((part.dtype, part.device) for part in parts)))
    return len(kinds) == 1


def drop_repeated(graph: GraphModule) -> GraphModule:
    """Compute each linear layer of a traced graph once: later calls with the same input and weights use its result."""
    first: dict[object, torch.fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is F.linear:
            same = first.setdefault((node.args, tuple(node.kwargs.items())), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.graph.erase_node(node)
    graph.recompile()
    return graph
