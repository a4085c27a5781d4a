"""Reads a `Config` from a TOML file, then lets the command line override any field."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from te_dist.launch.config import Config
from te_dist.launch.errors import JobError, require

PROGRAM = "te_dist.launch.train"
USAGE = f"""\
usage: python -m {PROGRAM} CONFIG.toml [--section.key VALUE ...]

The file holds the same keys; the command line wins. Every key, with the value it has without a file:
"""


def load(arguments: Sequence[str]) -> Config:
    """The configuration that the command line asks for.

    Args:
        arguments: the command line after the program's name; the first one may be a TOML file.

    Raises:
        JobError: a file that cannot be read, an unknown key or a value out of range.
        SystemExit: with code 0 after `--help`.
    """
    path, overrides = _split(arguments)
    defaults = Config() if path is None else read(path)
    return _override(defaults, overrides)


def read(path: Path) -> Config:
    """The configuration in a TOML file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"configuration {path}",
            got=error,
            wanted="a TOML file",
            remedy="check the path, which starts at the working directory",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"configuration {path}", got=error, wanted="valid TOML", remedy="mend that line") from error
    return build(Config, table)


def build(cls: type, table: Mapping[str, Any], *, prefix: str = "") -> Any:
    """An instance of dataclass `cls` from a mapping; keys left out keep their default.

    Raises:
        JobError: naming the dotted key, what it holds and what may stand there.
    """
    hints = get_type_hints(cls)
    values = {}
    for name, value in table.items():
        key = prefix + name
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            raise JobError(
                key,
                got="an unknown key",
                wanted=f"one of {', '.join(hints)}",
                remedy=f"did you mean {prefix}{near[0]}?" if near else "take it out",
            )
        values[name] = _convert(hints[name], value, key)
    return cls(**values)


def dump(config: Config) -> str:
    """The configuration as JSON text, for the record beside the results. Infinity, which JSON has not, is "inf"."""
    return json.dumps(_in_json(dataclasses.asdict(config)), indent=2)


def _in_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_json(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _convert(hint: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), key, got=repr(value), wanted="a table", remedy=f"write {key} = {{...}}")
        return build(hint, value, prefix=key + ".")  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_convert(get_args(hint)[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    if hint is float and (value == str(math.inf) or _fits(int, value)):
        return float(value)
    require(_fits(hint, value), key, got=repr(value), wanted=_describe(hint), remedy=f"correct {key}")
    return value


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(option, value) for option in get_args(hint))
    if get_origin(hint) is Literal:
        # Equality alone would take 0 for False.
        return any(type(value) is type(option) and value == option for option in get_args(hint))
    return type(value) is hint


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(json.dumps(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return "a list"
    return {int: "an integer", float: "a number", str: "a text in quotes", bool: "true or false"}[hint]


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    if arguments and not arguments[0].startswith("-"):
        return Path(arguments[0]), list(arguments[1:])
    return None, list(arguments)


def _override(defaults: Config, overrides: list[str]) -> Config:
    """`tyro` prints what is wrong in a box and exits: caught, so that every error of a job reads alike."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(Config, default=defaults, args=overrides, prog=PROGRAM, description=USAGE)
    except SystemExit as exit_:
        if not exit_.code:
            raise
        lines = [line.strip("│╭╮╰╯─ ") for line in complaint.getvalue().splitlines()]
        text = " ".join(line for line in lines[1:] if line and not line.startswith("For full helptext"))
        raise JobError(
            "command line",
            got=text.rstrip("."),
            wanted="keys and values as --help lists them",
            remedy="correct the option",
        ) from None
