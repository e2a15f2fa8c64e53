"""A dataclass of settings as options of a script's command line, explained by the docstrings under its fields."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trainer.errors import ConfigError

_ConfigT = TypeVar("_ConfigT")
# In the order in which they are tried; a text is everything else.
_TYPES = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
_METAVARS = {int: "N", float: "X"}


def add_options(parser: argparse.ArgumentParser, kind: type[Any], **names: str | None) -> None:
    """Give a parser an option for each field of a dataclass, such as `TrainerConfig` or `CheckpointConfig`.

    `batch_size: int = 100` becomes `--batch-size N`, and `compile: bool = False` becomes `--compile` and
    `--no-compile`. None is written `none`, and a tuple with commas. The fields of a dataclass within the dataclass have
    its field's name in front: `--fsdp-blocks`. A value that does not have its field's type ends the script as argparse
    does, with code 2. No option is required: `from_options` asks for a field without a default.

    Args:
        parser: gets a group of options with the name of the dataclass.
        kind: the dataclass. Its fields are bool, int, float, str, Path, None, Literal, a tuple of these, a union of
            these, or a dataclass. An `Annotated` may list values for the help: `Annotated[str, ("red", "blue")]`.
        names: a field's option where it is to have another name, as in `log_every_s="--log-every"`; None gives the
            field no option. The parsed value has the field's name in any case.

    Raises:
        ConfigError: there is no such field, or one has a type that a command line cannot give.
    """
    defaults = _defaults(kind)
    for name in names:
        if name not in defaults:
            raise ConfigError(f"{kind.__name__} has no field {name!r}; valid are {', '.join(defaults)}")
    group = parser.add_argument_group(kind.__name__, inspect.cleandoc(kind.__doc__ or "").partition("\n")[0])
    _add_fields(group, kind, defaults, names)


def from_options(kind: type[_ConfigT], parsed: argparse.Namespace, **settings: Any) -> _ConfigT:
    """Return the dataclass that the options of `add_options` say.

    Args:
        kind: the same dataclass.
        parsed: what the parser returned.
        settings: fields that the script sets itself, whatever the options say.

    Raises:
        ConfigError: a value is not valid, or a field without a default has none.
    """
    defaults = {name: default for name, default in _defaults(kind).items() if name not in settings}
    return kind(**settings, **_values(kind, defaults, vars(parsed)))


def _defaults(kind: Any) -> dict[str, Any]:
    """Return the default of each field of a dataclass, `MISSING` where it has none; of an instance, its values."""
    if not isinstance(kind, type):
        return {field.name: getattr(kind, field.name) for field in fields(kind) if field.init}
    return {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(kind)
        if field.init
    }


def _add_fields(
    group: argparse._ArgumentGroup,
    kind: type[Any],
    defaults: Mapping[str, Any],
    names: Mapping[str, str | None],
    prefix: str = "",
) -> None:
    hints, explained = get_type_hints(kind), _explanations(kind)
    annotated = get_type_hints(kind, include_extras=True)
    for name, default in defaults.items():
        option = names.get(name, f"--{prefix}{name}".replace("_", "-"))
        if option is None:
            continue
        if is_dataclass(hints[name]):
            _add_fields(group, hints[name], _defaults(default), {}, f"{prefix}{name}_")
            continue
        text = explained.get(name, "").replace("%", "%%")
        if default not in (None, (), MISSING) and default is not False:
            shown = ",".join(map(str, default)).replace("%", "%%") if isinstance(default, tuple) else "%(default)s"
            text += f" (default: {shown})"
        alternatives = _alternatives(hints[name], name)
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if bool not in alternatives:
            metavar = _metavar(alternatives, annotated[name], name)
            how = {"type": partial(_read, alternatives, default), "metavar": metavar}
        action = group.add_argument(option, dest=prefix + name, default=None if default is MISSING else default, **how)
        # Given to add_argument, the text would get the default of a flag once more, by Python 3.11 and 3.12.
        action.help = text.strip()


def _alternatives(hint: Any, name: str) -> list[Any]:
    """Return the types and the literal values that a type stands for, in the order in which they are tried.

    Raises:
        ConfigError: the field `name` has a type that cannot be read from a text.
    """
    if get_origin(hint) in (Union, types.UnionType):
        every = [alternative for part in get_args(hint) for alternative in _alternatives(part, name)]
        return sorted(every, key=lambda part: list(_TYPES).index(part) if part in _TYPES else -1)
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if hint is type(None):
        return [None]
    if hint is bool or hint in _TYPES or (get_origin(hint) is tuple and get_args(hint)):
        return [hint]
    raise ConfigError(f"{name} has the type {hint}, which a command line cannot give; {name}=None leaves it out")


def _read(alternatives: list[Any], default: Any, text: str) -> Any:
    """Return the first of the alternatives that a text can stand for."""
    for alternative in alternatives:
        if get_origin(alternative) is tuple:
            if str in alternatives and text == default:
                return text
            items = _alternatives(get_args(alternative)[0], "tuple")
            return tuple(_read(items, None, part) for part in text.split(",") if part)
        if alternative in _TYPES:
            try:
                return alternative(text)
            except ValueError:
                continue
        if text == _spelled(alternative):
            return alternative
    valid = [_TYPES.get(alternative) or _spelled(alternative) for alternative in alternatives]
    raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid is {' or '.join(valid)}")


def _spelled(value: Any) -> str:
    return "none" if value is None else str(value)


def _metavar(alternatives: list[Any], annotated: Any, name: str) -> str:
    """Return what stands for an option's value: the valid ones, a letter for a number, or the field's name."""
    listed = next((rule for rule in getattr(annotated, "__metadata__", ()) if isinstance(rule, tuple | list)), ())
    choices = listed or [value for value in alternatives if isinstance(value, str | int)]
    if choices:
        return "|".join(map(_spelled, choices))
    numbers = [] if str in alternatives else [_METAVARS[part] for part in alternatives if part in _METAVARS]
    return (numbers or [name.upper()])[0]


def _explanations(kind: type[Any]) -> dict[str, str]:
    """Return the first paragraph of each field's docstring.

    Python keeps no docstrings of fields, so they are read from the source; where there is none, nothing is explained.
    """
    explained = {}
    for base in reversed(kind.__mro__):
        for pair in pairwise(_class_bodies(base.__module__).get(base.__name__, [])):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    explained[name] = " ".join(docstring.partition("\n\n")[0].split())
    return explained


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class in a module; nothing where its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _values(
    kind: type[Any], defaults: Mapping[str, Any], parsed: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return the value of each of these fields: the parsed one, or the default where no option was added for it."""
    hints, values = get_type_hints(kind), {}
    for name, default in defaults.items():
        if is_dataclass(hints[name]):
            inner = _values(hints[name], _defaults(default), parsed, f"{prefix}{name}_")
            values[name] = replace(default, **inner)
            continue
        values[name] = parsed.get(prefix + name, default)
        if default is MISSING and values[name] in (None, MISSING):
            raise ConfigError(f"{kind.__name__} needs {name}, and it is not given")
    return values
