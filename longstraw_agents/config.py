"""Settings from TOML into frozen dataclasses, checked.

Idea: a dataclass is the schema. A section of the file is a field that is a dataclass itself; a key is a field. Unknown keys are
refused with the nearest known one, types are checked without conversions that lose anything (an integer is a float, nothing else
changes), and ranges are the dataclass's own business in `__post_init__`. TOML has no null: leave a key out to keep its default,
and write "none" where a setting may be None and that is not its default.

    load(Path("run.toml"), RunConfig)
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from longstraw_agents.errors import ConfigError

T = TypeVar("T")


def load(path: Path, schema: type[T], overrides: Mapping[str, Any] | None = None) -> T:
    """Read a TOML file into `schema`; `overrides` maps dotted keys to values that win over the file's.

    Raises `ConfigError` for a file that is missing or no TOML, an unknown key, a wrong type or a value out of its range.
    """
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for dotted, value in (overrides or {}).items():
        *sections, key = dotted.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
    return build(schema, tree)


def build(schema: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Make a dataclass from a nested mapping; `where` is the dotted path that error messages begin with."""
    hints = typing.get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema) if field.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(fields))}"
            raise ConfigError(f"unknown key {_join(where, key)!r}; {hint}")
    chosen = {key: convert(hints[key], value, _join(where, key)) for key, value in values.items()}
    missing = [name for name, field in fields.items() if name not in chosen and _required(field)]
    if missing:
        raise ConfigError(f"{where or 'the configuration'} lacks {', '.join(missing)}")
    try:
        return schema(**chosen)
    except ConfigError as error:
        raise ConfigError(f"[{where}] {error}" if where else str(error)) from error


def dump(settings: Any) -> str:
    """A dataclass as TOML that `load` reads back to an equal one."""
    lines: list[str] = []
    _dump_table(plain(settings), "", lines)
    return "\n".join(lines).strip() + "\n"


def plain(value: Any) -> Any:
    """A value as TOML and JSON know it: dataclasses become mappings, tuples lists, enumerations and paths strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init)
        return {
            field.name: "none" if item is None else plain(item)
            for field, item in items
            if item is not None or field.default is not None
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value.value if isinstance(value, enum.Enum) else value


def _dump_table(table: Mapping[str, Any], where: str, lines: list[str]) -> None:
    simple = {key: item for key, item in table.items() if not isinstance(item, dict)}
    if where and (simple or not table):
        lines += ["", f"[{where}]"]
    lines += [f"{_dump_key(key)} = {_dump_value(item)}" for key, item in simple.items()]
    for key, item in table.items():
        if isinstance(item, dict):
            _dump_table(item, _join(where, _dump_key(key)), lines)


def _dump_key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else _dump_value(key)


def _dump_value(value: Any) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's too; only infinities and inline tables differ."""
    if isinstance(value, list):
        return "[" + ", ".join(_dump_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_dump_key(key)} = {_dump_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def convert(hint: Any, value: Any, where: str) -> Any:
    """Check one value against a type hint and return it in that type; `ConfigError` says what was wanted and what came."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is typing.Literal:
        return _one_of(list(arguments), value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return _convert_tuple(arguments, value, where)
    if origin in (list, typing.get_origin(typing.Sequence[Any])) and isinstance(value, (list, tuple)):
        return [convert(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {str(key): convert(arguments[1], item, _join(where, str(key))) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return build(hint, value, where)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(_one_of([member.value for member in hint], value, where))
    elif hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is int):
        return value
    raise ConfigError(f"{where} must be {_describe(hint)}, not {value!r}")


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    """The first member that fits. With a single member besides None its own message is the better one."""
    if value in (None, "none") and type(None) in arguments:
        return None
    members = [member for member in arguments if member is not type(None)]
    if len(members) == 1:
        return convert(members[0], value, where)
    for member in members:
        try:
            return convert(member, value, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where} must be {' or '.join(_describe(member) for member in members)}, not {value!r}")


def _convert_tuple(arguments: tuple[Any, ...], value: list[Any] | tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(convert(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if len(arguments) != len(value):
        raise ConfigError(f"{where} must have {len(arguments)} entries, not {len(value)}")
    return tuple(convert(arguments[index], item, f"{where}[{index}]") for index, item in enumerate(value))


def _one_of(known: list[Any], value: Any, where: str) -> Any:
    if value in known:
        return value
    close = difflib.get_close_matches(str(value), [str(item) for item in known], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "known values: " + ", ".join(repr(item) for item in known)
    raise ConfigError(f"{where} is {value!r}; {hint}")


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    if hint in names:
        return names[hint]
    if dataclasses.is_dataclass(hint):
        return "a table"
    return str(hint).replace("typing.", "")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
