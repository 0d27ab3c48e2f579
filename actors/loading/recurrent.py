"""Checks that a method suits models with recurrent layers, from their configurations alone."""

from __future__ import annotations

from typing import Any

from configs.drafters import LayerSkipDrafterConfig, ModelDrafterConfig, NoDrafterConfig
from configs.load import ConfigError
from configs.method import MethodConfig
from configs.section import ExternalTreeConfig
from configs.trees import ChainTreeConfig, StaticTreeConfig
from models.loading.recurrent import recurrent_types


def check_recurrent(method: MethodConfig, target: Any, drafter: Any | None) -> None:
    """Raise ConfigError if a method verifies or drafts trees with a model whose configuration, `target` or `drafter`,
    has recurrent layers, or drafts with a part of its layers.

    A state follows one path of tokens; each branch of a tree would need a state of its own.
    """
    for where, section in method.places.items():
        if isinstance(section.drafter, NoDrafterConfig):
            continue
        models = {"model.target": target}
        if isinstance(section.drafter, ModelDrafterConfig) and drafter is not None:
            models["model.drafter"] = drafter
        for name, config in models.items():
            if not (kinds := recurrent_types(config)):
                continue
            has = f"{name} has layers of type {' and '.join(kinds)}"
            if isinstance(section.drafter, LayerSkipDrafterConfig):
                raise ConfigError(
                    f"{where}.drafter: {has}, whose states a forward of some of its layers would change; take another "
                    "drafter than 'layer_skip'"
                )
            if not is_chain(section):
                raise ConfigError(
                    f"{where}.tree: {has}, whose states follow one path, and a tree '{section.tree.kind}' has several; "
                    "take the tree 'chain'"
                )


def is_chain(method: MethodConfig) -> bool:
    """Return whether no node of a method's trees has two children; true for external trees, which engines check."""
    tree = method.tree
    if isinstance(tree, StaticTreeConfig):
        return tree.name is None and all(width == 1 for width in tree.branching) and not any(map(any, tree.paths))
    return isinstance(tree, ChainTreeConfig | ExternalTreeConfig)
