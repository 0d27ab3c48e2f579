"""Checks and unifies Arrow column types: valid types of media, ids and prompt values, one type over many files."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from configs.load import ConfigError
from pipeline.formats.kind import Needs

NULL_MAX_BYTES = 1024 * 1024
"""Maximum bytes of null values: rows that cannot be read have null in every kept column."""


def is_bytes(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pt.is_binary, pt.is_large_binary, pt.is_binary_view, pt.is_fixed_size_binary))


def is_text(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pt.is_string, pt.is_large_string, pt.is_string_view))


def is_list(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pt.is_list, pt.is_large_list, pt.is_fixed_size_list))


def holds_bytes(kind: pa.DataType) -> bool:
    """Return whether values of this type are or contain bytes."""
    if is_list(kind):
        return holds_bytes(kind.value_type)
    if pt.is_struct(kind):
        return any(holds_bytes(field.type) for field in kind.fields)
    return is_bytes(unpacked(kind))


def null_bytes(kind: pa.DataType) -> int:
    """Return the bytes that a null of this type takes; an item of a list of fixed size takes one at least."""
    if pt.is_fixed_size_list(kind):
        return int(kind.list_size) * max(1, null_bytes(kind.value_type))
    if pt.is_struct(kind):
        return sum(null_bytes(field.type) for field in kind.fields)
    return int(kind.byte_width) if pt.is_fixed_size_binary(kind) else 16


def is_media(kind: pa.DataType) -> bool:
    """Return whether this is a type of media: bytes, text (URIs), `struct<bytes, path>`, or null."""
    if pt.is_struct(kind):
        parts = {field.name: field.type for field in kind.fields}
        encoded, path = parts.get("bytes", pa.string()), parts.get("path", pa.string())
        return (is_bytes(encoded) or pt.is_null(encoded)) and (is_text(path) or pt.is_null(path))
    return is_bytes(kind) or is_text(kind) or pt.is_null(kind)


def unpacked(kind: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary type, other types unchanged; view types become plain types."""
    return without_views(kind.value_type if pt.is_dictionary(kind) else kind)


def without_views(kind: pa.DataType) -> pa.DataType:
    """Replace view types at any depth by plain types, because most Arrow functions do not support views."""
    if pt.is_string_view(kind):
        return pa.string()
    if pt.is_binary_view(kind):
        return pa.binary()
    if pt.is_struct(kind):
        return pa.struct([field.with_type(without_views(field.type)) for field in kind.fields])
    for check, make in _LISTS:
        if check(kind):
            return make(kind.value_field.with_type(without_views(kind.value_type)))
    return kind


_LISTS = (
    (pt.is_list, pa.list_),
    (pt.is_list_view, pa.list_),
    (pt.is_large_list, pa.large_list),
    (pt.is_large_list_view, pa.large_list),
)


def without_dictionaries(kind: pa.DataType) -> pa.DataType:
    """Replace dictionary types inside lists, maps and structs by the types of their values."""
    if pt.is_dictionary(kind):
        return kind.value_type
    if pt.is_struct(kind):
        return pa.struct([field.with_type(without_dictionaries(field.type)) for field in kind.fields])
    if pt.is_map(kind):
        return pa.map_(without_dictionaries(kind.key_type), without_dictionaries(kind.item_type))
    if pt.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(without_dictionaries(kind.value_type)), kind.list_size)
    for check, make in _LISTS:
        if check(kind):
            return make(kind.value_field.with_type(without_dictionaries(kind.value_type)))
    return kind


def plain_values(values: pa.Array) -> pa.Array:
    """Cast the values to their type `without_views` and `without_dictionaries`."""
    kind = without_views(values.type)
    if "dictionary<" in str(kind):
        kind = without_dictionaries(kind)
    if kind.equals(values.type):
        return values
    if "list_view<" in str(values.type):  # Arrow's own cast fails if some of the lists are null
        return pa.array(values.to_pylist(), kind)
    return values.cast(kind)


def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type in tables of rows: dictionaries are unpacked, all-null columns become strings."""
    kind = unpacked(kind)
    return pa.string() if pt.is_null(kind) else kind


def check(schema: pa.Schema, needs: Needs, where: str) -> None:
    """Raise ConfigError for ambiguous needed columns or unusable types; `where` is the file's name in messages."""
    source = needs.source
    for name, dotted in needs.columns().items():
        if len(schema.get_all_field_indices(name)) > 1:
            raise ConfigError(f"{dotted}: {where} has several columns named {name!r}")
        if (size := null_bytes(kind := schema.field(name).type)) > NULL_MAX_BYTES:
            message = f"a value of which takes {size} bytes even if it is null, more than {NULL_MAX_BYTES}"
            raise ConfigError(f"{dotted}: {name!r} in {where} is {kind}, {message}")
    for what, column in (("image", source.columns.image), ("video", source.columns.video)):
        if column is None:
            continue
        kind = unpacked(schema.field(column).type)
        part = kind.value_type if is_list(kind) else kind
        if not (is_media(part) or (pt.is_integer(part.value_type if is_list(part) else part) and is_list(kind))):
            raise ConfigError(
                f"source.columns.{what}: {column!r} in {where} is {kind}; {what}s are bytes, URIs, "
                "struct<bytes, path>, or lists of those"
            )
    if source.id_column is not None:
        kind = plain(schema.field(source.id_column).type)
        if not (is_text(kind) or pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind)):
            raise ConfigError(f"source.id_column: {source.id_column!r} in {where} is {kind}; ids are text or integers")
    for name, dotted in needs.fields.items():
        if is_bytes(plain(schema.field(name).type)):
            raise ConfigError(f"{dotted}: the column {name!r} in {where} contains bytes, which a prompt cannot contain")


def unify(earlier: pa.Field, later: pa.Field, where: str) -> pa.Field:
    """Return a field for both files' values: integers and floats may become wider, but never another kind of type;
    ConfigError with the column and the file `where` of the later field if the types conflict."""
    types = earlier.type, later.type
    if types[0].equals(types[1]) or pt.is_null(types[1]):
        return earlier
    if pt.is_null(types[0]):
        return later
    same_kind = any(all(map(is_kind, types)) for is_kind in (pt.is_integer, pt.is_floating, is_text, is_bytes))
    try:
        if not same_kind and not all(map(pt.is_nested, types)):
            raise pa.ArrowTypeError("kinds differ")
        schemas = [pa.schema([earlier]), pa.schema([later])]
        merged: pa.Field = pa.unify_schemas(schemas, promote_options="permissive" if same_kind else "default").field(0)
    except pa.ArrowException:
        raise ConfigError(
            f"sink.keep_columns: {earlier.name!r} is {types[1]} in {where} and {types[0]} in an earlier file; "
            "its type must be one"
        ) from None
    return merged
