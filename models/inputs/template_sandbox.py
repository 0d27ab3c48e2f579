"""Compile chat templates for a sandbox that counts steps and sizes, with transformers' own filters and functions.

Each node of a template that makes or reads values of any size, or repeats others, becomes a call that counts first.
Nothing is evaluated while a template is compiled.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

from jinja2 import Environment, Template, meta, nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner
from jinja2.visitor import NodeTransformer
from markupsafe import Markup
from transformers.utils import chat_template_utils

from models.inputs.template_meter import CELL, TemplateTooCostly
from models.inputs.template_operations import (
    BORROWING,
    COMPARISONS,
    FILTERS,
    MAX_WIDTH,
    check_filter,
    check_method,
    check_operator,
    format_time,
    meter,
)

MAX_TEMPLATE_CHARS = 128 * 1024
MAX_NODES = 16_000
"""Nodes of a template's syntax tree; published templates have up to about 4,000."""
NODES_PER_STEP = 16
_CALLABLE = (Macro, BlockReference, LoopContext, Joiner, Undefined)
_OWNERS = (LoopContext, Cycler, Joiner, Extension)
_REFUSED = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.EvalContextModifier)


class TemplateRefused(ValueError):
    """Raised for a chat template that cannot be compiled; the message is a part of a sentence."""


def compile_template(source: str) -> Template:
    """Compile a chat template, whose rendering needs a meter in `METER`. Raises TemplateRefused."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateRefused(f"it has {len(source):,} characters, and at most {MAX_TEMPLATE_CHARS:,} are compiled")
    environment = _environment()
    try:
        tree: nodes.Template = environment.parse(source)
        _expect_bounds(tree)
        tree = _Counted().visit(tree)
        tree.set_environment(environment)  # nodes that replace others have none
        return environment.from_string(tree)
    except TemplateRefused:
        raise
    except RecursionError:
        raise TemplateRefused("its expressions are nested too deep") from None
    except Exception as error:  # jinja2 and the compiler of Python raise errors of several kinds
        raise TemplateRefused(f"{str(error).strip() or type(error).__name__}"[:300]) from None


def variables(source: str) -> set[str]:
    """Return the names that a chat template reads and does not define itself."""
    return meta.find_undeclared_variables(_environment().parse(source))


def _expect_bounds(tree: nodes.Template) -> None:
    """Raise TemplateRefused if a template is so large that compiling it, which takes the product of its statements and
    its names, would take long."""
    num_nodes, num_branches, names = 0, 1, set[str]()
    queue: list[nodes.Node] = [tree]
    while queue:
        node = queue.pop()
        num_nodes += 1
        num_branches += isinstance(node, (nodes.If, nodes.For, nodes.Macro, nodes.CallBlock, nodes.Assign))
        if isinstance(node, (nodes.Name, nodes.NSRef, nodes.Macro)):
            names.add(node.name)
        queue.extend(node.iter_child_nodes())
    if num_nodes > MAX_NODES or num_branches * len(names) > MAX_NODES * NODES_PER_STEP:
        raise TemplateRefused(f"it has {num_nodes:,} parts, {num_branches:,} statements and {len(names):,} names")


@cache
def _environment() -> _Sandbox:
    # An empty template shows the environment that transformers makes for any template.
    return _Sandbox(chat_template_utils._compile_jinja_template("").environment)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers, in which operators, calls, filters and outputs are counted."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, original: Environment) -> None:
        extensions = [type(extension) for extension in original.extensions.values()]
        super().__init__(
            trim_blocks=original.trim_blocks,
            lstrip_blocks=original.lstrip_blocks,
            extensions=extensions,
            optimized=False,
            finalize=_emitted,
        )
        self.filters = {name: _filter(original, name) for name in FILTERS if name in original.filters}
        self.filters |= {"counted_steps": _steps, "counted_value": _made, "counted_read": _read}
        self.filters |= {"counted_slice": _sliced, "counted_concat": _concat}
        self.tests = {name: _test(original, name) for name in original.tests}
        self.globals = {name: value for name, value in original.globals.items() if name != "lipsum"}
        self.globals["strftime_now"] = format_time(original.globals["strftime_now"])  # type: ignore[arg-type]
        self._functions = {id(value) for value in self.globals.values()}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(meter(), operator, left, right)
        return meter().made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        counter = meter()
        if isinstance(__obj, types.BuiltinMethodType):
            check_method(counter, __obj, args, kwargs)
        elif not __self._is_bounded(__obj):
            raise TemplateTooCostly(f"it calls {type(__obj).__name__}, which is not bounded")
        counter.step()
        result = super().call(__context, __obj, *args, **kwargs)
        is_borrowed = isinstance(__obj, types.BuiltinMethodType) and __obj.__name__ in BORROWING
        return result if is_borrowed else counter.made(result)

    def _is_bounded(self, function: Any) -> bool:
        owner = getattr(function, "__self__", None)
        return (
            isinstance(function, _CALLABLE)
            or id(function) in self._functions
            or id(owner) in self._functions
            or isinstance(owner, _OWNERS)
            or getattr(function, "formats_in_bounds", False)
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a bounded function for the methods `format` and `format_map` of text, None for other values."""
        if not isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            return None
        template = value.__self__
        if value.__name__ not in ("format", "format_map") or not isinstance(template, str):
            return None
        if isinstance(template, Markup):
            raise TemplateTooCostly("it formats text that is marked as safe")
        formatter = _Formatter(self)

        def bounded(*args: Any, **kwargs: Any) -> str:
            is_map = value.__name__ == "format_map"
            return formatter.vformat(str(template), () if is_map else args, args[0] if is_map else kwargs)

        bounded.formats_in_bounds = True  # type: ignore[attr-defined]
        return bounded


class _Formatter(SandboxedFormatter):
    """Formats each place of a text within bounds."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if any(part.isdecimal() and int(part[:9]) > MAX_WIDTH for part in _numbers_in(format_spec)):
            raise TemplateTooCostly(f"it pads a value to more than {MAX_WIDTH} characters")
        meter().expect(meter().text_size(value))
        return meter().made(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        meter().expect(meter().text_size(value) * (1 if conversion is None else 10))
        return super().convert_field(value, conversion)


def _numbers_in(spec: str) -> list[str]:
    return "".join(char if char.isdecimal() else " " for char in spec).split()


# --- counted operations --------------------------------------------------------------------------------------------


@pass_context
def _emitted(_context: Context, value: Any) -> str:
    counter = meter()
    if not isinstance(value, str):
        counter.expect(counter.text_size(value))
        value = str(value)
    counter.made(str(value))
    return str(value)


@pass_context
def _steps(_context: Context, count: int) -> bool:
    meter().step(max(1, count))  # templates can call this filter too
    return True


@pass_context
def _made(_context: Context, value: Any) -> Any:
    return meter().made(value)


@pass_context
def _read(_context: Context, value: Any) -> Any:
    return meter().read(value)


@pass_context
def _sliced(_context: Context, value: Any) -> Any:
    counter = meter()
    size = len(value) * (1 if isinstance(value, str) else CELL) if hasattr(value, "__len__") else 1
    counter.units -= size
    counter.step(1 + size // 1024)
    return value


@pass_context
def _concat(_context: Context, values: list[Any]) -> str:
    counter = meter()
    counter.expect(sum(map(counter.text_size, values)))
    return str(counter.made("".join(map(str, values))))


def _filter(original: Environment, name: str) -> Callable[..., Any]:
    """Return a filter of transformers' environment that counts."""

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        counter = meter()
        value = check_filter(counter, name, value, args, kwargs)
        result = original.call_filter(name, value, args, kwargs, context=context, eval_ctx=context.eval_ctx)
        if hasattr(result, "__next__"):
            return counter.counted(result)
        return result if result is value or name in ("first", "last", "attr", "d", "default") else counter.made(result)

    return counted


def _test(original: Environment, name: str) -> Callable[..., Any]:
    """Return a test of transformers' environment that counts, if it compares values."""
    if name not in COMPARISONS:
        return original.tests[name]  # type: ignore[return-value]

    @pass_context
    def counted(context: Context, value: Any, *args: Any) -> bool:
        for operand in (value, *args):
            meter().read(operand)
        return bool(original.call_test(name, value, args, {}, context))

    return counted


class _Counted(NodeTransformer):
    """Replaces nodes of a template by counted ones."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED):
            raise TemplateRefused(f"line {node.lineno} uses a statement that chat templates do not have")
        return super().generic_visit(node, *args, **kwargs)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            nodes.Const(child.data, lineno=child.lineno) if isinstance(child, nodes.TemplateData) else child
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("counted_concat", nodes.List(node.nodes, lineno=node.lineno))

    def _new_value(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _call("counted_value", node)

    visit_List = visit_Tuple = visit_Dict = _new_value

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operation.expr for operation in node.ops)]
        is_flat = [isinstance(operand, nodes.Const) for operand in operands]
        # Equality with a constant reads no more than the constant.
        if len(node.ops) == 1 and node.ops[0].op in ("eq", "ne") and any(is_flat):
            return node
        node.expr = node.expr if is_flat[0] else _call("counted_read", node.expr)
        for operation, flat in zip(node.ops, is_flat[1:], strict=True):
            operation.expr = operation.expr if flat else _call("counted_read", operation.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _call("counted_slice", node.node)
        elif not isinstance(node.arg, (nodes.Const, nodes.BinExpr, nodes.Neg)):
            node.arg = _call("counted_read", node.arg)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = _weight(node.body)
        self.generic_visit(node)
        node.body = [_tick(weight, node), *node.body]
        if node.test is not None:
            counted = _call("counted_steps", nodes.Const(1, lineno=node.lineno))
            node.test = nodes.And(counted, node.test, lineno=node.lineno)
        return node

    def _repeated(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        weight = _weight(node.body)
        self.generic_visit(node)
        node.body = [_tick(weight, node), *node.body]
        return node

    visit_Macro = visit_CallBlock = visit_Block = _repeated


def _call(name: str, value: Any) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _tick(weight: int, node: nodes.Node) -> nodes.Node:
    return nodes.ExprStmt(_call("counted_steps", nodes.Const(weight, lineno=node.lineno)), lineno=node.lineno)


def _weight(body: list[nodes.Node]) -> int:
    """Return the steps of running statements once, besides those of counted operations."""
    return 1 + sum(1 for node in body for _ in node.find_all(nodes.Node)) // NODES_PER_STEP
