"""Hydra config -> validated :class:`runner.schema.Config`, and Hydra's many errors -> one line each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner import schema
from runner.errors import ConfigError, UserError, nearest, suggestion
from runner.validation import validate


def config_folder() -> Path:
    """Return ``conf/``: inside the package in a wheel, beside it in a checkout."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def register_schema() -> None:
    """Make the dataclasses known to Hydra as ``gearsail_schema``, the first entry of ``conf/config.yaml``."""
    node = OmegaConf.structured(schema.Config)
    OmegaConf.set_struct(node.model.kwargs, False)  # the names in it are the custom module's own
    ConfigStore.instance().store(name="gearsail_schema", node=node)


def to_config(composed: DictConfig) -> schema.Config:
    """Turn what Hydra composed into a checked config.

    Raises:
        ConfigError: for a key that the schema does not have (``+x=1`` and ``++a.b=1`` get past Hydra), a value of the wrong
            type, out of range, or a combination that can't work.
    """
    _reject_extra_keys(composed, schema.Config(), "")
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(config, schema.Config)
    validate(config)
    return config


def _reject_extra_keys(node: DictConfig, reference: Any, prefix: str) -> None:
    known = [item.name for item in schema.dataclasses.fields(reference)]
    for key in node:
        if key not in known:
            raise ConfigError(_unknown_key(f"{prefix}{key!s}"))
        child = getattr(reference, str(key))
        if schema.dataclasses.is_dataclass(child):
            _reject_extra_keys(node[key], child, f"{prefix}{key}.")


def _unknown_key(full_key: str) -> str:
    group, _, leaf = full_key.rpartition(".")
    if full_key == "exp":
        return "unknown option 'exp': an experiment is chosen with +exp=NAME, and its file begins with '# @package _global_'"
    if full_key.startswith("hydra."):
        return f"unknown option '{full_key}'; Hydra's own are listed by --cfg hydra"
    siblings = [name.removeprefix(f"{group}.") for name in schema.option_names(group)]
    if not group:
        siblings = [item.name for item in schema.dataclasses.fields(schema.Config)]
    if not siblings:
        best = nearest(full_key, schema.option_names())
        return (
            f"unknown option '{full_key}'"
            + (f": did you mean '{best}'?" if best else "")
            + "; all: python -m runner --cfg job"
        )
    where = f" in {group}" if group else ""
    return f"unknown option '{leaf}'{where}: {suggestion(leaf, siblings)}"


def explain(error: Exception) -> UserError:
    """Return the one-line error for whatever Hydra or OmegaConf raised while composing."""
    if isinstance(error.__cause__, UserError):
        return error.__cause__  # raised by a resolver of ours
    if isinstance(error, MissingConfigException):
        return _explain_missing(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    text = " ".join(str(error).split())
    key = _bad_key(cause, text)
    if key is not None:
        return ConfigError(_in_file(text) + _unknown_key(key))
    if isinstance(cause, OmegaConfBaseException):
        full_key = getattr(cause, "full_key", None) or ""
        reason = str(cause).strip().splitlines()[0]
        return ConfigError(_in_file(text) + (f"{full_key}: {reason}" if full_key else reason))
    return ConfigError(_first_sentence(text))


def _explain_missing(error: MissingConfigException) -> ConfigError:
    missing = error.missing_cfg_file or ""
    group, _, choice = missing.rpartition("/")
    if error.options is None:
        return ConfigError(_first_sentence(" ".join(str(error).split())))
    label = f"{group}={choice}" if group else missing
    return ConfigError(f"{label}: no such choice; {suggestion(choice or missing, error.options)}")


def _bad_key(cause: BaseException | None, text: str) -> str | None:
    """The dotted name of a key that the schema has not, out of OmegaConf's error or Hydra's wording; None for other errors."""
    named = re.search(r"Key '([^']+)' (?:is not in struct|not in '(\w+)')", f"{cause or ''} {text}")
    if named is None:
        return None
    overridden = re.search(r"Could not override '([^']+)'", text)
    full_key = getattr(cause, "full_key", None) or (overridden.group(1) if overridden else named.group(1))
    # a YAML file's key comes without its group, but with the type that it isn't in
    group = _GROUP_OF_TYPE.get(named.group(2) or "")
    return f"{group}.{full_key}" if group and "." not in full_key else str(full_key)


_GROUP_OF_TYPE = {
    type(getattr(schema.Config(), item.name)).__name__: item.name for item in schema.dataclasses.fields(schema.Config)
}


def _in_file(text: str) -> str:
    found = re.match(r"In '([^']+)':", text)
    return f"{found.group(1)}.yaml: " if found else ""


def _first_sentence(text: str) -> str:
    return text.split(" Config search path:")[0].split(" Set the environment variable")[0].strip()


COMPOSE_ERRORS = (HydraException, OmegaConfBaseException)
