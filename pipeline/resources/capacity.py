"""Describes what a Ray can give a job: its nodes, and the nodes that an autoscaler can add."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ACCELERATOR = "accelerator_type:"
"""Prefix of the resource by which Ray finds an accelerator type."""
UNLIMITED = 1_000_000
"""Number of nodes of a type without a limit."""
_SET = re.compile(r"in\((.*)\)")


@dataclass(frozen=True)
class Node:
    """`count` nodes with the same resources and labels; `kind` is the name of their node type, if it is known.

    A node type that an autoscaler can add may have further labels than the known ones: `labels` is None if none are
    known, and Ray's own labels (`ray.io/…`) are set only when a node starts.
    """

    resources: Mapping[str, float]
    labels: Mapping[str, str] | None
    count: int = 1
    kind: str = ""
    exists: bool = True

    @property
    def gpus(self) -> int:
        return int(self.resources.get("GPU", 0))

    @property
    def cpus(self) -> float:
        return self.resources.get("CPU", 0.0)

    def has_labels(self, selector: Mapping[str, str]) -> bool:
        """Return whether the node matches a `label_selector`, or may match it."""
        return all(self._matches(name, condition) for name, condition in selector.items())

    def _matches(self, name: str, condition: str) -> bool:
        if self.labels is None or (not self.exists and name.startswith("ray.io/") and name not in self.labels):
            return True
        positive = condition.removeprefix("!")
        listed = _SET.fullmatch(positive)
        values = [value.strip() for value in listed[1].split(",")] if listed else [positive]
        return (self.labels.get(name) in values) != condition.startswith("!")

    def has_accelerator(self, accelerator_type: str | None) -> bool:
        return not accelerator_type or self.resources.get(f"{ACCELERATOR}{accelerator_type}", 0) > 0


@dataclass(frozen=True)
class Capacity:
    """The nodes of a Ray at `where` (`this machine`, or a cluster with its address), and those that can be added."""

    where: str
    nodes: tuple[Node, ...]
    is_open: bool = False
    """Whether an autoscaler has node types that cannot be read from here, so that nothing can be excluded."""
    is_private: bool = False
    """Whether the job starts this Ray, on this machine."""
    has_cuda: bool = True
    """Whether torch can use the GPUs."""

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of existing nodes."""
        return sum(node.count * node.gpus for node in self.nodes if node.exists)

    @property
    def accelerators(self) -> list[str]:
        names = {name for node in self.nodes for name, number in node.resources.items() if number > 0}
        return sorted(name.removeprefix(ACCELERATOR) for name in names if name.startswith(ACCELERATOR))

    def __str__(self) -> str:
        """Return the GPUs as text, such as `this machine has 1 GPU`."""
        text = f"{self.where} has {count_gpus(self.num_gpus)}"
        if self.is_private:
            return text if self.has_cuda or not self.num_gpus else f"{text}, and not for CUDA"
        existing, added = ([node for node in self.nodes if node.exists is exists] for exists in (True, False))
        number = sum(node.count for node in existing)
        if self.num_gpus and number > 1:
            text += f" on {number:,} nodes, at most {max(node.gpus for node in existing)} on one"
        if self.is_open:
            text += "; the node types of its autoscaler cannot be read from here"
        elif added:
            types = ", ".join(f"{_number(node)} of type {node.kind} ({count_gpus(node.gpus)})" for node in added)
            text += f"; its autoscaler can add {types}"
        return text


def _number(node: Node) -> str:
    return "any number" if node.count >= UNLIMITED else f"{node.count:,}"


def count_gpus(number: float) -> str:
    """Return a number of GPUs as text."""
    return "no GPU" if not number else f"{number:g} GPU{'' if number <= 1 else 's'}"
