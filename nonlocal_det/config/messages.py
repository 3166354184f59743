"""The words of messages about settings: key, value, and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nonlocal_det.errors import ConfigError


def config_error(key: str, value: Any, why: str) -> ConfigError:
    """Return the error of a wrong setting; ``why`` says what is wrong with it, and what to write."""
    return ConfigError(f"{key} is {value!r}: {why}")


def check_choice(cfg: Mapping[str, Any], key: str, right: Sequence[Any]) -> None:
    """Raise a ConfigError, unless the value of a key is one of those that are right."""
    value = get_value(cfg, key)
    if value not in right:
        raise config_error(key, value, f"not known; write one of {', '.join(map(repr, right))}")


def check_least(cfg: Mapping[str, Any], key: str, least: float, why: str) -> None:
    """Raise a ConfigError where the value of a key is less than it may be."""
    value = get_value(cfg, key)
    if value < least:
        raise config_error(key, value, why)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a hint at the known name that is most like a wrong one; "" where none is like it."""

    def last(path: str) -> str:
        return re.split(r"[./]", path.removesuffix(".yaml"))[-1]

    close = [other for other in known if last(other) == last(name)] or difflib.get_close_matches(name, known)
    return f"; did you mean {close[0]}?" if close else ""


def flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Go through the values of nested mappings under their dotted keys, such as "MODEL.NONLOCAL.POOL"."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def get_value(cfg: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key."""
    for part in key.split("."):
        cfg = cfg[part]
    return cfg
