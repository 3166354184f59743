"""Loading a config: files with their bases, overrides, and who set what. Nothing is registered here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from detectron2.config import CfgNode, get_cfg

from nonlocal_det.config.keys import EXAMPLES
from nonlocal_det.config.messages import config_error, did_you_mean, flatten
from nonlocal_det.errors import ConfigError, one_line

#: Folder of the configs: inside the package once installed, beside it in a source checkout.
CONFIG_ROOT = next(
    folder
    for folder in (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")
    if folder.is_dir()
)


class LoadedConfig(NamedTuple):
    """A config, and who set what in it."""

    cfg: CfgNode  # not frozen
    user_keys: set[str]  # that the user's own files and overrides set
    folders: list[Path]  # of the user's own files; that of the file which was named comes first


def load_config(
    config_file: str | os.PathLike[str], opts: Sequence[Any], add_keys: Callable[[CfgNode], None]
) -> LoadedConfig:
    """Load a config file with its bases, and overrides, as :func:`nonlocal_det.get_config` says.

    Args:
        config_file: a path, or else a name under ``configs/``.
        opts: overrides, ``[KEY, VALUE, KEY, VALUE, ...]``; a value is a Python object or its text.
        add_keys: adds the keys that Detectron2 does not have.

    Raises:
        ConfigError: the file or an override cannot be read, or a key or the type of a value is wrong.
    """
    path, opts = find_config(config_file), list(opts)
    cfg = get_cfg()
    add_keys(cfg)
    defaults = dict(flatten(cfg))
    set_keys = _merge_file(cfg, path, defaults)
    _merge_opts(cfg, opts, defaults)
    set_keys.update(opts[0::2])
    _refuse_none(cfg, defaults)
    for node, key in ((cfg.MODEL, "WEIGHTS"), (cfg, "OUTPUT_DIR")):
        node[key] = os.path.expanduser(node[key])
    if "MODEL.DEVICE" not in set_keys and not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
    chain = _own_files(path)
    user_keys = {key for values in chain.values() for key, _ in flatten(values)}.union(opts[0::2])
    return LoadedConfig(cfg, user_keys, [file.parent for file in chain])


def _refuse_none(cfg: CfgNode, defaults: Mapping[str, Any]) -> None:
    """Refuse null: yacs lets it take the place of a value of any type."""
    values = dict(flatten(cfg))
    for key, right in defaults.items():
        if right is not None and values.get(key, right) is None:
            right = EXAMPLES.get(key, right)
            raise config_error(key, None, f"must be a {type(right).__name__}, such as {right!r}")


def find_config(config_file: str | os.PathLike[str]) -> Path:
    """Return the path of a config file that is named by its path, or by its name under ``configs/``.

    Raises:
        ConfigError: there is no such file.
    """
    name = os.fspath(config_file)
    if not name:
        raise ConfigError(
            "no config file: name one, such as COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
        )
    for path in (Path(name).expanduser(), CONFIG_ROOT / name):
        if os.path.isfile(path):  # unlike Path.is_file, it takes a name of any length
            return path
    known = sorted(path.relative_to(CONFIG_ROOT).as_posix() for path in CONFIG_ROOT.rglob("*.yaml"))
    raise ConfigError(
        f"config file {name}: no such file, and no such name under {CONFIG_ROOT}{did_you_mean(name, known)}"
    )


def _merge_file(cfg: CfgNode, path: Path, known: Mapping[str, Any]) -> set[str]:
    """Merge the file and its bases; return the keys that they set."""
    try:
        chain = CfgNode.load_yaml_with_base(str(path), allow_unsafe=False)
    except yaml.constructor.ConstructorError as error:
        tag = re.search(r"tag '[^']*?(python[^']*)'", str(error))
        what = f"the tag !!{tag.group(1)} is refused" if tag else one_line(error)
        raise ConfigError(
            f"config file {_where(error, path)}: {what}, as it could run code; write the plain value instead"
        ) from None
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or one_line(error)
        raise ConfigError(f"config file {_where(error, path)}: not valid YAML: {problem}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path}: not a text file; write YAML in UTF-8") from None
    except OSError as error:
        what = f"cannot read {error.filename or path}: {error.strerror or error}"
        hint = "_BASE_ is looked up beside the file that names it"
        raise ConfigError(f"config file {path}: {what}; {hint}") from None
    except (AssertionError, AttributeError, TypeError):  # a list, a lone word or nothing at all
        chain = None
    except RecursionError:
        raise ConfigError(f"config file {path}: it is its own _BASE_, by itself or through others") from None
    if not isinstance(chain, dict):
        what = "it, or its _BASE_, is not made of KEY: value lines; write such lines"
        raise ConfigError(f"config file {path}: {what}")
    if dotted := next((key for key in _keys(chain) if "." in key), None):
        raise ConfigError(
            f"config file {path}: {dotted} is written in one word; in a file each part stands on a line "
            "of its own, indented below the one before"
        )
    values = dict(flatten(chain))
    try:
        cfg.merge_from_file(str(path), allow_unsafe=False)
    except (KeyError, ValueError, AssertionError, TypeError, AttributeError) as error:
        raise ConfigError(f"config file {path}: {_explain(error, known, values=values)}") from None
    return set(values)


def _keys(node: Mapping[str, Any]) -> Iterator[str]:
    for key, value in node.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from _keys(value)


def _own_files(path: Path) -> dict[Path, dict[str, Any]]:
    """Return a config file and its bases with what each one holds, without the project's own files."""
    if path.resolve().is_relative_to(CONFIG_ROOT.resolve()):
        return {}
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    bases = values.pop("_BASE_", [])
    files = {path: values}
    for base in bases if isinstance(bases, list) else [bases]:
        if "://" not in base:
            files.update(_own_files(path.parent / Path(base).expanduser()))
    return files


def _merge_opts(cfg: CfgNode, opts: list[Any], known: Mapping[str, Any]) -> None:
    if len(opts) % 2:
        raise ConfigError(
            f"overrides come as KEY VALUE pairs, but {opts[-1]!r} stands alone at the end of {opts}"
        )
    for key, value in zip(opts[0::2], opts[1::2], strict=True):
        try:
            cfg.merge_from_list([key, value])
        except (KeyError, ValueError, AssertionError, TypeError, AttributeError) as error:
            raise ConfigError(f"override {key} {value!r}: {_explain(error, known, key)}") from None


def _explain(
    error: Exception,
    known: Mapping[str, Any],
    key: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> str:
    """Turn what yacs raises into one line with the key, the value of ``values``, and what would be right."""
    text = " ".join(str(error.args[0] if error.args else error).split())
    if key is None:
        found = re.search(r"(?:config key|[Nn]on-existent(?: config)? key): (\S+)", text)
        key = found.group(1) if found else None
    inside = [name for name in known if key and name.startswith(key + ".")]
    if key in known:
        right = EXAMPLES.get(key, known[key])
        value = f" ({values[key]!r})" if values and key in values else ""
        kind = type(right).__name__
        return f"{key} has a value of the wrong type{value}; write a {kind}, such as {right!r}"
    if inside:
        return f"{key} is a group of keys; write one of them, such as {inside[0]}"
    if "xistent" in text:
        return f"no such key: {key}{did_you_mean(key or '', list(known))}"
    if isinstance(error, (TypeError, AttributeError)):
        return "a group of keys, such as MODEL, has a plain value; write its keys below it, indented"
    return text or type(error).__name__


def _where(error: yaml.YAMLError, path: Path) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{mark.name}, line {mark.line + 1}" if mark is not None else str(path)
