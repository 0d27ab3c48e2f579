"""Checks the values that the parts of a method return in a step; reads them on the host, so it is for tests only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from decoding.conformance.contract import CheckedAcceptance, CheckedTree, ContractError
from decoding.contracts import VerificationOutput
from decoding.tree import AcceptanceResult, DraftTree


def expect_all(is_right: Tensor, message: str, values: Tensor | None = None) -> None:
    """Raise ContractError, with the first wrong value, unless all elements are true."""
    if not bool(is_right.all()):
        first = "" if values is None else f": {values[~is_right][0].item()}"
        raise ContractError(f"{message}{first}")


class CheckedTreeValues(CheckedTree):
    """Proxy of a `TreePolicy` that checks tokens and parents too."""

    def finish(self) -> DraftTree:
        tree = super().finish()
        where, valid = f"{self.title}.finish returned", tree.valid
        tokens = tree.tokens[valid]
        inside = (tokens >= 0) & (tokens < self._spec.vocab_size)
        size = self._spec.vocab_size
        expect_all(inside, f"{where} a token outside the target's vocabulary of {size}", tokens)
        expect_all(valid[:, 0] & (tree.parents[:, 0] < 0), f"{where} a tree whose node 0 is not the root")
        expect_all(tree.depth[:, 0] == 0, f"{where} a root whose depth is not 0", tree.depth[:, 0])
        if tree.num_nodes == 1:
            return tree
        parents, numbers = tree.parents[:, 1:], tree.tokens.new_tensor(range(1, tree.num_nodes))
        drafted = valid[:, 1:]
        before = ((parents >= 0) & (parents < numbers)) | ~drafted
        expect_all(before, f"{where} a node whose parent does not precede it")
        above = parents.clamp_min(0)
        depth = tree.depth.gather(1, above) + 1
        expect_all(
            (tree.depth[:, 1:] == depth) | ~drafted, f"{where} a node whose depth is not that of its parent plus 1"
        )
        expect_all(valid.gather(1, above) | ~drafted, f"{where} a valid node below an invalid one")
        return tree


class CheckedAcceptanceValues(CheckedAcceptance):
    """Proxy of an `Acceptance` that checks paths and tokens too."""

    def __init__(self, part: Any, name: str) -> None:
        super().__init__(part, name)
        self.num_accepted = self.num_judged = 0

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        result = super().accept(verification)
        tree, where = verification.tree, f"{self.title}.accept returned"
        width = result.path.shape[1]
        expect_all((result.n >= 1) & (result.n <= width), f"{where} n outside of 1 to {width}", result.n)
        used = result.n[:, None] > result.path.new_tensor(range(width))
        path = result.path
        expect_all(~used | ((path >= 0) & (path < tree.num_nodes)), f"{where} a path with a node outside of the tree")
        path = path.clamp(0, tree.num_nodes - 1)
        expect_all(path[:, 0] == 0, f"{where} a path that does not begin at the root")
        expect_all(~used | tree.valid.gather(1, path), f"{where} a path over an invalid node")
        follows = tree.parents.gather(1, path)[:, 1:] == path[:, :-1]
        expect_all(~used[:, 1:] | follows, f"{where} a path whose nodes are not parent and child")
        size = self._spec.vocab_size
        inside = (result.next >= 0) & (result.next < size)
        expect_all(inside, f"{where} a next token outside the target's vocabulary of {size}", result.next)
        special = tree.tokens.gather(1, path).unsqueeze(-1) == path.new_tensor(sorted(self._spec.special_ids))
        expect_all(~(used & result.relaxed & special.any(-1)), f"{where} a relaxed EOS or other special token")
        self.num_judged += len(result.n)
        self.num_accepted += int(result.n.sum()) - len(result.n)
        return result
