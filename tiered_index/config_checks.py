"""Checks of settings by pydantic, and messages about wrong ones.

`tiered_index.config` imports this module only if a setting is given that it can't check alone: pydantic takes half as
long to import as the rest of a reader. Pure; any thread.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    create_model,
    field_validator,
)
from pydantic_core import ErrorDetails

from tiered_index.config import MOST, PREFIX, TABLES, IndexConfig, holds, of_environment, unknown, usable_uri
from tiered_index.errors import ConfigError, StorageMisconfigured
from tiered_index.retention import TABLES_OF_TOPICS, parse_bytes, parse_duration
from tiered_index.storage.disk import absolute_path

_AGES = ("age_s", "segments_age_s", "grace_s")


class _Checks(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation is not bool and bool not in get_args(annotation):
            raise ValueError(f"must not be {str(value).lower()}")  # pydantic converts it to 1 or 0
        if isinstance(value, Mapping) and info.field_name in TABLES:
            kinds = get_type_hints(annotation)
            for name, inner in value.items():
                if isinstance(inner, bool) and name in kinds and bool not in (kinds[name], *get_args(kinds[name])):
                    raise ValueError(f"{name} must not be {str(inner).lower()}")
        return value

    @field_validator("coalesce_gap_bytes", mode="before", check_fields=False)
    @classmethod
    def _gap(cls, value: Any) -> Any:
        if value == "price" or isinstance(value, bool):
            return value
        try:
            gap = int(value)
            is_whole = 0 <= gap <= MOST and (not isinstance(value, float) or gap == value)
        except (OverflowError, TypeError, ValueError):
            is_whole = False
        if not is_whole:
            raise ValueError(f"must be a whole number of bytes, not negative and at most {MOST:.15g}, or price")
        return gap

    @field_validator("retention", mode="before", check_fields=False)
    @classmethod
    def _with_units(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        parsed = dict(value)
        if isinstance(parsed.get("max_bytes"), str):
            parsed["max_bytes"] = _parsed(parse_bytes, "max_bytes", parsed["max_bytes"])
        for table in TABLES_OF_TOPICS:
            topics = parsed.get(table)
            if isinstance(topics, str):  # from an environment variable
                try:
                    topics = parsed[table] = json.loads(topics)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{table} must be a table, as JSON") from error
            if isinstance(topics, Mapping):
                parsed[table] = {p: _parsed(parse_duration, f"{table}.{p}", age) for p, age in topics.items()}
        ages = {name: _parsed(parse_duration, name, parsed[name]) for name in _AGES if parsed.get(name) is not None}
        return parsed | ages

    @field_validator("root", "cache_dir", "storage", *TABLES, mode="wrap", check_fields=False)
    @classmethod
    def _usable(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            if value == "":
                raise ValueError("must not be empty")
            if info.field_name == "storage" and isinstance(value, Path):
                value = str(value)
            value = handler(value)
            if info.field_name == "storage" and value is not None:
                # refuse a URI with credentials before the settings are logged or printed
                usable_uri(value)
            return absolute_path(value) if isinstance(value, Path) else value
        except StorageMisconfigured:
            raise
        except ConfigError as error:
            # pydantic adds the name of the setting
            raise ValueError(str(error)) from error


@functools.cache
def _model() -> type[BaseModel]:
    hints = get_type_hints(IndexConfig)
    declared: dict[str, Any] = {
        each.name: (hints[each.name], Field(None, **each.metadata)) for each in fields(IndexConfig)
    }
    return create_model("IndexConfig", __base__=_Checks, **declared)


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the types that they are declared with. Raises `ConfigError` naming every wrong one."""
    try:
        model = _model()(**values)
    except ValidationError as error:
        raise ConfigError(_problems(error)) from error
    return {name: getattr(model, name) for name in model.model_fields_set}


def located(
    error: ConfigError, given: dict[str, Any], in_file: dict[str, Any], file: Path | None, environment: bool
) -> ConfigError:
    """Return an error of `checked` with the variable or the file that has each wrong setting; any other as it is."""
    if not isinstance(error.__cause__, ValidationError):
        return error
    return ConfigError(_problems(error.__cause__, given, in_file, file, environment))


_SENTENCES = {
    "bool_": "must be true or false",
    "int_": "must be a whole number",
    "float_": "must be a number",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length:,} characters",
    "string_": "must be text",
    "path_": "must be a path",
    "dict_type": "must be a table",
    "literal_error": "must be one of {expected}",
    "greater_than_equal": "must be at least {ge:.15g}",
    "greater_than": "must be greater than {gt:.15g}",
    "less_than_equal": "must be at most {le:.15g}",
    "less_than": "must be less than {lt:.15g}",
    "is_subclass_of": "must be a class that derives from {class}",
    "model_": "must be a table of settings",
    "dataclass_": "must be a table of settings",
}


def _problems(
    error: ValidationError,
    given: dict[str, Any] | None = None,
    in_file: dict[str, Any] | None = None,
    file: Path | None = None,
    environment: bool = True,
) -> str:
    """Return a message that lists all problems, each with the environment variable or the file that has it."""
    # not by names: a table in the environment sets only what it has
    set_as = {(PREFIX + "__".join(path)).upper(): name for name, path, _ in of_environment()} if environment else {}
    by_place: dict[str, list[str]] = {}
    for each in error.errors():
        path, problem = _problem(each)
        names = [(PREFIX + "__".join(path[:count])).upper() for count in range(len(path), 0, -1)]
        variable = next((set_as[name] for name in names if name in set_as), None)
        if given is None or holds(given, path):
            place = ""
        elif variable is not None:
            place = f"environment variable {variable}: "
        else:
            place = f"{file}: " if in_file and holds(in_file, path) else ""
        by_place.setdefault(place, []).append(problem)
    return "; ".join(place + "; ".join(problems) for place, problems in by_place.items())


def _problem(error: ErrorDetails) -> tuple[list[str], str]:
    """Return the path of a pydantic error, and a message. The message omits the value, which may be a secret."""
    path = [str(part) for part in error["loc"]]
    name = ".".join(path) or "settings"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = TABLES[path[0]] if path[1:] else [each.name for each in fields(IndexConfig)]
        return path, unknown(path[-1], known, *path[:-1])
    sentence = in_our_words(error)
    if error["type"] != "value_error":
        example = f", such as {name}.{next(iter(TABLES[name]))}" if name in TABLES else ""
        return path, f"setting {name} {sentence}{example}"
    if name in TABLES:
        # a message about a table begins with the name of a setting in it
        inner = re.split("[ .:]", sentence, maxsplit=1)[0]
        return [name, inner], f"setting {name}.{sentence}"
    return path, f"setting {name}: {sentence}"


def _parsed(parse: Callable[[str], int], name: str, value: Any) -> Any:
    """Parse a setting in a table. Raises `ValueError` naming the setting, also for an age without a unit."""
    if isinstance(value, bool):
        value = str(value).lower()  # pydantic would convert it to 1 or 0
    is_number = isinstance(value, int | float)
    if is_number:
        value = f"{value:g}" if isinstance(value, float) else str(value)
    try:
        return parse(value) if isinstance(value, str) else value
    except ValueError as error:
        hint = " as text; in Python, the class Retention takes seconds" if is_number else ""
        raise ValueError(f"{name}: {error}{hint}") from error


def in_our_words(error: ErrorDetails) -> str:
    """Return a message for a pydantic error. Only our own checks quote the value, which may be a secret."""
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"]).removesuffix(".")
    sentence = next((ours for kind, ours in _SENTENCES.items() if error["type"].startswith(kind)), None)
    return sentence.format_map(context) if sentence is not None else error["msg"]
