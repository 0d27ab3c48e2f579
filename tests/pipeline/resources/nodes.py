"""Capacities and pools for tests of resources."""

from __future__ import annotations

from typing import Any

from pipeline.resources.capacity import Capacity, Node
from pipeline.resources.requests import Actors


def machine(gpus: int, cpus: float = 64, **resources: float) -> Capacity:
    return Capacity("this machine", (Node({"CPU": cpus, "GPU": gpus, **resources}, {}),), is_private=True)


def cluster(*nodes: Node, is_open: bool = False) -> Capacity:
    return Capacity("the cluster at head:6379", nodes, is_open)


def node(gpus: int, cpus: float = 8, count: int = 1, exists: bool = True, kind: str = "", **labels: str) -> Node:
    return Node({"CPU": cpus, "GPU": gpus}, labels, count, kind, exists)


def engines(gpus: float | None = None, count: int = 1, most: int = 0, tenths: int = 9, **fields: Any) -> Actors:
    return Actors("pool", gpus, count, max(count, most), tenths=tenths, **fields)


def decoders(gpus: float | None = None, count: int = 1, most: int = 0, **fields: Any) -> Actors:
    return Actors("vq", gpus, count, max(count, most), tenths=1, **fields)


def workers(count: int, gpus: float | None = None) -> Actors:
    return Actors("workers", gpus, count, count, "count", shares=False, cpus_with_gpu=0.0, cpus_without=1.0)
