"""Refuses requests that a Ray can never give: Ray itself reports no error and waits for ever. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from configs.load import ConfigError
from pipeline.resources.capacity import Capacity, count_gpus
from pipeline.resources.gpu_shares import Shares, allowed, sized
from pipeline.resources.packing import Sized, fit_together, most_of, units_of
from pipeline.resources.requests import Actors, Tasks


def refuse_unknown_nodes(pools: Sequence[Actors], tasks: Sequence[Tasks], capacity: Capacity) -> None:
    """Raise ConfigError if no node has the labels or the accelerator type of a pool or of tasks."""
    if capacity.is_open:
        return
    for pool in pools:
        _refuse_labels(f"{pool.where}.label_selector", pool.labels, capacity)
        if not any(node.has_accelerator(pool.accelerator_type) for node in capacity.nodes):
            there = ", ".join(capacity.accelerators) or "none"
            raise ConfigError(
                f"{pool.where}.accelerator_type: {pool.accelerator_type}, and {_no_node(capacity)} has it (there: "
                f"{there}); leave it out, or run where there is one"
            )
        if not allowed(pool, capacity):
            raise ConfigError(
                f"{pool.where}.accelerator_type: {pool.accelerator_type}, and {_no_node(capacity)} has it and the "
                f"labels {_shown(pool.labels)} of {pool.where}.label_selector; leave one of them out"
            )
    for task in tasks:
        _refuse_labels(task.labels_where, task.labels, capacity)


def _refuse_labels(where: str, labels: Mapping[str, str], capacity: Capacity) -> None:
    if any(node.has_labels(labels) for node in capacity.nodes):
        return
    known = {f"{name}={value}" for node in capacity.nodes for name, value in (node.labels or {}).items()}
    there = ", ".join(sorted(label for label in known if not label.startswith("ray.io/node-id="))) or "none"
    raise ConfigError(
        f"{where}: {_shown(labels)}, and {_no_node(capacity)} has these labels (there: {there}); leave it out, or "
        "start nodes with them"
    )


def _shown(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in labels.items()) + "}"


def _no_node(capacity: Capacity) -> str:
    if capacity.is_private:
        return "no Ray on this machine"
    types = " and no node type of its autoscaler" if any(not node.exists for node in capacity.nodes) else ""
    return f"no node of {capacity.where}{types}"


def refuse_gpus(pools: Sequence[Actors], shares: Shares, capacity: Capacity) -> None:
    """Raise ConfigError if the GPUs of the actors that start together can never be given, or models name a GPU and
    their actors have none."""
    for pool in pools:
        named = [where for where, device in pool.devices.items() if device.startswith("cuda")]
        if named and not shares[pool.where]:
            why = "is 0" if pool.gpus is not None else f"(auto) is 0, because {capacity}"
            raise ConfigError(f"{named[0]}: '{pool.devices[named[0]]}', and {pool.dotted} {why}; set it to auto or cpu")
    if capacity.is_open:
        return
    for pool in pools:
        if shares[pool.where] and most_of(_starting(pool, shares, capacity), capacity.nodes) < pool.count:
            raise ConfigError(_too_many_gpus(pool, shares, capacity))
    if not fit_together([_starting(pool, shares, capacity) for pool in pools], capacity.nodes):
        parts = " and ".join(f"{_number(pool)} of {shares[pool.where]:g} ({pool.dotted})" for pool in pools)
        raise ConfigError(
            f"{pools[-1].dotted}: the job starts {parts} at the same time, and {capacity}"
            f"{_cpu_remark(pools, shares, capacity)}; leave both out (auto), or lower them"
        )


def _starting(pool: Actors, shares: Shares, capacity: Capacity) -> Sized:
    gpus = shares[pool.where]
    # `refuse_cpus` compares the CPUs of a single node.
    return sized(pool, units_of(gpus), capacity, 0.0 if capacity.is_private else pool.cpus(gpus))


def _number(pool: Actors) -> str:
    return f"{pool.count:,} actor{'s' if pool.count > 1 else ''}"


def _too_many_gpus(pool: Actors, shares: Shares, capacity: Capacity) -> str:
    gpus = shares[pool.where]
    each = "each actor" if pool.count == 1 else f"each of {pool.count:,} actors ({pool.where}.{pool.counted_by})"
    auto = "" if pool.gpus is not None else " (auto)"
    most = most_of(_starting(pool, shares, capacity), capacity.nodes)
    if not any(node.gpus for node in capacity.nodes):
        advice = "leave it out (auto) to run on the CPU, or run where there are GPUs"
    elif most:
        advice = f"at most {most:,} can run at once; lower {pool.where}.{pool.counted_by}"
        advice += f", or set {pool.dotted} to 0" if not pool.shares else f" or {pool.dotted}"
    else:
        advice = "leave it out (auto), or lower it"
    if remark := _cpu_remark([pool], shares, capacity):
        advice = f"start nodes with more CPUs, or set {pool.dotted} to 0"
    return f"{pool.dotted}: {count_gpus(gpus)}{auto} for {each}, and {capacity}{remark}; {advice}"


def _cpu_remark(pools: Sequence[Actors], shares: Shares, capacity: Capacity) -> str:
    """Return a remark if the nodes have enough GPUs, and not the CPU that each actor on a GPU reserves beside it."""
    fits = fit_together([sized(pool, units_of(shares[pool.where]), capacity) for pool in pools], capacity.nodes)
    return ", but not the CPU beside it that each of these actors reserves" if fits else ""


def needed_cpus(pools: Sequence[Actors], shares: Shares) -> float:
    """Return the CPUs that the actors of a job reserve together."""
    return sum(pool.count * pool.cpus(shares[pool.where]) for pool in pools)


def refuse_cpus(
    pools: Sequence[Actors], tasks: Sequence[Tasks], shares: Shares, capacity: Capacity, dotted: str
) -> None:
    """Raise ConfigError if the CPUs of the actors, or of a task beside them, can never be given; `dotted` is the path
    of the CPUs of a local Ray, or of the cluster's address."""
    if capacity.is_open:
        return
    total, reserved = sum(node.count * node.cpus for node in capacity.nodes), needed_cpus(pools, shares)
    there = f"a Ray on this machine has {total:g}" if capacity.is_private else f"{capacity.where} has {total:g}"
    for task in (*tasks, Tasks("actors", 0.0)):
        largest = max((node.cpus for node in capacity.nodes if node.has_labels(task.labels)), default=0.0)
        if units_of(task.cpus) <= units_of(min(largest, total - reserved)):
            continue
        what = f"one {task.what} task takes {_cpus(task.cpus)}" if task.cpus else "its actors need CPUs"
        if units_of(task.cpus) > units_of(largest):
            why = there if capacity.is_private else f"no node of {capacity.where} has them (at most {largest:g})"
        else:
            why = f"{there}, of which the job's actors reserve {reserved:g}"
        advice = "start nodes with more CPUs"
        if capacity.is_private:
            advice = f"set job.num_cpus to {math.ceil(task.cpus + reserved)} or more"
        raise ConfigError(f"{task.where or dotted}: {what}, and {why}; {'lower it, or ' if task.where else ''}{advice}")


def _cpus(number: float) -> str:
    return f"{number:g} CPU{'' if number <= 1 else 's'}"
