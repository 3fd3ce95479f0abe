"""Blocks of the config: frozen pydantic dataclasses whose errors are one line with the dotted key.

A block declares the type, range, default and description of each key. Validation, error messages, the JSON schema
(`config.schema`) and the tables of docs/config.md (`docs/config_tables.py`) are all derived from this declaration.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import pydantic.dataclasses
from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StrictBool,  # noqa: F401 (blocks import it from here, like the other types of keys)
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema
from typing_extensions import dataclass_transform

from mst_scale.errors import UserError, format_value, nearest

Block = TypeVar("Block")
MILLION = 10**6
MAX_SEED = 2**63 - 1  # torch and numpy take a signed 64-bit number
MAX_STEPS = 10**7  # the paper has 140,000
MAX_TOKENS = 2**24  # in a sequence or a vocabulary
NO_EFFECT: dict[str, Any] = {"changesResult": False}
"""`json_schema_extra` of a key that cannot change the result of a run, so that a resumed run may have another value."""
_UNKNOWN = "unexpected_keyword_argument"  # pydantic's name for a key that a dataclass does not have
# Python's JSON reader accepts NaN and Infinity, which are not JSON; deferring the build keeps imports fast
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)

Duration = (
    Annotated[StrictInt, Field(ge=0, le=MAX_STEPS, description="steps")]
    | Annotated[StrictFloat, Field(ge=0, le=1, description="a share of the run")]
)
"""Steps if int, fraction of the run if float."""


@dataclass(frozen=True)
class ZeroOr:
    """Annotates a number that is in [least, most], or 0, which has a special meaning."""

    least: float
    most: float
    meaning: str
    """The meaning of 0."""

    def __str__(self) -> str:
        return f"0 ({self.meaning}) or a number from {self.least:g} to {self.most:g}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"const": 0}, {**handler(schema), "minimum": self.least, "maximum": self.most}]}

    def _check(self, value: float) -> float:
        if value != 0 and not self.least <= value <= self.most:
            raise PydanticCustomError("range", "outside of the range")
        return value


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def block(path: str, extra: Literal["forbid", "allow"] = "forbid") -> Callable[[type[Block]], type[Block]]:
    """Make a class a block of the config.

    Args:
        path: the dotted key of the block, for messages: "mst.sparsity".
        extra: "allow" for a block of DeepSpeed, of which only some keys are validated.

    Returns:
        A decorator that makes the class a frozen pydantic dataclass whose constructor raises UserError.
    """

    def made(cls: type[Block]) -> type[Block]:
        result: Any = pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict({**_CONFIG, "extra": extra}))(cls)
        validate = result.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                validate(self, *args, **kwargs)
            except ValidationError as error:
                raise UserError(_format(error, result, path)) from None
            finally:
                result.__init__ = __init__  # pydantic's deferred build has replaced it

        result.__init__ = __init__
        return typing.cast(type[Block], result)

    return made


def parse(cls: type[Block], values: Any, path: str, where: str) -> Block:
    """Validate a dict as a block.

    Args:
        cls: the block.
        values: the block in a config.
        path: the dotted key of the block.
        where: the name of the config, for messages.

    Raises:
        UserError: names the first invalid key and its valid values, or the nearest name if the key is misspelled.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: {path} must be an object, not {format_value(values)}")
    known, adapter = _adapter(typing.cast(Any, cls), path)
    try:
        made = typing.cast(Block, adapter.validate_python(values))
    except ValidationError as error:
        raise UserError(f"{where}: {_format(error, known, path)}") from None
    # an object of the block made of a plain dataclass could not be pickled
    return made if known is cls else cls(**{name: getattr(made, name) for name in fields_of(known)})


@cache
def _adapter(cls: Any, path: str) -> tuple[Any, TypeAdapter[Any]]:
    """Return a block and its validator; a plain dataclass (options of a registered method) becomes a block first."""
    known = cls if hasattr(cls, "__pydantic_fields__") else block(path)(cls)
    return known, TypeAdapter(known)


def fields_of(cls: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a block, or of a plain dataclass, by name."""
    return typing.cast(Mapping[str, FieldInfo], _adapter(cls, "")[0].__pydantic_fields__)


def keys_of(cls: Any, path: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) of a block and of the blocks in it, each after the key that holds it."""
    for name, field in fields_of(cls).items():
        key = f"{path}.{name}" if path else name
        yield key, field
        for option in _options(field.annotation):
            if dataclasses.is_dataclass(option):
                yield from keys_of(option, key)


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, with their annotations."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(option for part in typing.get_args(annotation) for option in _options(part))
    return (annotation,)


# --- messages ---


def _format(error: ValidationError, cls: Any, path: str) -> str:
    """Format the first error as one line. In a union, report the alternative whose error is nested deepest."""
    found = [(*_locate(cls, path, each["loc"]), each) for each in error.errors(include_url=False)]
    unknown = [one for one in found if one[2]["type"] == _UNKNOWN]
    first = (unknown or found)[0][0]
    key, field, detail = max(
        (one for one in unknown or found if one[0].startswith(first) or first.startswith(one[0])),
        key=lambda one: one[0].count("."),
    )
    if detail["type"] == _UNKNOWN:
        return _format_unknown(cls, path, key)
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    expected = "an object" if field is None else _describe(field.annotation, field.metadata)
    return f"{key} must be {expected}, not {format_value(detail['input'])}"


def _locate(cls: Any, path: str, location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """Return the dotted key and the field of an error.

    pydantic's location also contains members of unions and indices of lists, which are not part of the key.
    """
    key, field, inside = path, None, [cls]
    for each in location:
        positional = isinstance(each, int) and field is None
        part = list(fields_of(cls))[int(each)] if positional else each
        holder = next((one for one in inside if part in fields_of(one)), None)
        if holder is not None:
            field = fields_of(holder)[str(part)]
            inside = [option for option in _options(field.annotation) if dataclasses.is_dataclass(option)]
        elif isinstance(part, int) or not inside or part in [one.__name__ for one in inside] or "[" in part:
            continue
        key = f"{key}.{part}" if key else str(part)
    return key, field


def _format_unknown(cls: Any, path: str, key: str) -> str:
    """Format an unknown key, and suggest the same name in a nested block or one with a similar spelling."""
    holder, _, name = key.rpartition(".")
    known = [other for other, _ in keys_of(cls, path)]
    deeper = [other for other in known if other.startswith(f"{holder}.") and other.rpartition(".")[2] == name]
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == holder]
    near = deeper or [f"{holder}.{other}" for other in [nearest(name, siblings)] if other]
    hint = (
        f"the nearest valid one is '{near[0]}'" if near else f"{holder} takes {', '.join(siblings) or 'no keys here'}"
    )
    return f"unknown key {format_value(key)}: {hint}"


def _describe(annotation: Any, metadata: list[Any]) -> str:
    """Describe the valid values of a key: "an integer from 1 to 1,024 or null"."""
    return " or ".join(dict.fromkeys(_describe_one(option, metadata) for option in _options(annotation)))


def _describe_one(option: Any, metadata: list[Any]) -> str:
    if typing.get_origin(option) is Annotated:
        option, *own = typing.get_args(option)
        meant = next((one.description for one in own if isinstance(one, FieldInfo) and one.description), None)
        metadata = [*metadata, *(limit for one in own for limit in getattr(one, "metadata", [one]))]
        return _describe_one(option, metadata) if meant is None else f"{meant} ({_describe_one(option, metadata)})"
    if option is type(None):
        return "null"
    if dataclasses.is_dataclass(option):
        return "an object"
    if typing.get_origin(option) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(option))
    if typing.get_origin(option) is list:
        (item,) = typing.get_args(option)
        return "a list of strings" if item is str else f"two numbers, each {_describe_one(item, [])}"
    for limit in metadata:
        if isinstance(limit, ZeroOr) and option in (int, float):
            return str(limit)
    name = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[option]
    return f"{name}{_format_range(metadata)}" if option in (int, float) else name


def _format_range(metadata: list[Any]) -> str:
    limits: dict[type, Any] = {type(one): one for one in metadata if isinstance(one, Ge | Gt | Le | Lt)}
    least = limits[Ge].ge if Ge in limits else limits[Gt].gt if Gt in limits else None
    most = limits[Le].le if Le in limits else limits[Lt].lt if Lt in limits else None
    if least is None:
        return ""
    if most is None or most == MAX_SEED:
        return f" of at least {least:,}" if Ge in limits else f" above {least:,}"
    if Ge in limits and Le in limits:
        return f" from {least:,} to {most:,}"
    return f" in {'[' if Ge in limits else '('}{least:,}, {most:,}{']' if Le in limits else ')'}"
