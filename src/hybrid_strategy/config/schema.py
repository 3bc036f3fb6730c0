"""The schema that Hydra composes into, and the check of what stands in the open groups."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from hybrid_strategy.config.door import door, from_plain
from hybrid_strategy.config.folders import name_folder, new_stamp
from hybrid_strategy.config.hugging_face import with_sizes
from hybrid_strategy.config.literal import escape
from hybrid_strategy.config.messages import Shown, explained
from hybrid_strategy.config.ranges import check_ranges
from hybrid_strategy.config.secrets import without_secrets
from hybrid_strategy.config.settings import OPEN_GROUPS, ClusterSettings, RunConfig
from hybrid_strategy.config.targets import open_kinds
from hybrid_strategy.errors import ConfigError, message

SCHEMA = "hybrid_schema"


def register() -> None:
    """Tells Hydra the schema (`defaults: - hybrid_schema`) and the resolvers of this command, which name a new folder."""
    _tell(ConfigStore.instance())
    stamp = new_stamp()

    def run_dir(given: str | None, output_dir: str, name: str) -> str:
        return str(given) if given else f"{name_folder(str(output_dir), str(name))}/{stamp}"

    def sweep_dir(given: str | None, output_dir: str, name: str) -> str:
        return str(given) if given else name_folder(f"{output_dir}/sweeps", str(name))

    OmegaConf.register_new_resolver("hybrid_run_dir", run_dir, replace=True)
    OmegaConf.register_new_resolver("hybrid_sweep_dir", sweep_dir, replace=True)
    OmegaConf.register_new_resolver("hybrid_quotient", lambda number, divisor: int(number) // int(divisor), replace=True)


@cache
def _tell(store: ConfigStore) -> None:
    """Once: Hydra copies what it holds, and makes a node of every setting."""
    store.store(SCHEMA, door(RunConfig, OPEN_GROUPS), provider="hybrid_strategy")


def read(config: DictConfig, run_dir: str | None = None) -> RunConfig:
    """The frozen configuration from a composed one; everything resolved but secrets, every shipped key typed.

    Raises:
        ConfigError: a key that does not exist, a value of the wrong type, or one that is missing.
    """
    config = deepcopy(config)
    try:
        with read_write(config), open_dict(config):
            if "hydra" in config:
                del config["hydra"]
            if run_dir is not None:
                config.paths.run_dir = run_dir
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise explained(error) from error
    return from_values(without_secrets(config, {str(key): value for key, value in values.items()}))  # type: ignore[union-attr]


def from_values(values: Mapping[str, Any]) -> RunConfig:
    """The frozen configuration from resolved plain containers, such as a run folder's `config.yaml`."""
    checked = dict(values)
    for group in OPEN_GROUPS:
        checked[group] = _typed(group, dict(checked.get(group) or {}))
    check_ranges(checked)
    words = {key: str(checked["strategy"][key]).lower() for key in ("sharding", "activation_checkpoint")}
    checked["strategy"] = {**checked["strategy"], **words}  # names of parts, in any case
    checked["cluster"] = from_plain(ClusterSettings, checked["cluster"])
    return from_plain(RunConfig, checked)


def _typed(group: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of an open group with defaults and types where `_target_` is known."""
    if group in ("model", "data") and values.get("_target_") is None:
        rule, advice = "it names the class", f"Set {group}=<option>, or {group}._target_=<module.Class>"
        raise ConfigError(message(f"{group}._target_", Shown("missing"), rule, "", advice))
    if group == "model":
        values = with_sizes(values)
    for path, kind in open_kinds(group, values).items():
        _, _, entry = path.partition(".")
        if entry:
            values[entry] = _merged(path, kind, values[entry])
        else:
            values = _merged(path, kind, values)
    for name, entry in values.items() if group in ("callbacks", "logger") else ():
        if entry is not None and (not isinstance(entry, Mapping) or "_target_" not in entry):
            rule = f"each entry of {group} is a mapping with a _target_"
            raise ConfigError(message(f"{group}.{name}", entry, rule, "", f"Set {group}.{name}._target_, or {group}.{name}=null"))
    return values


def _merged(path: str, kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        literal = OmegaConf.create(escape(values), flags={"allow_objects": True})
        merged = OmegaConf.merge(OmegaConf.structured(door(kind)), literal)
        return OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise explained(error, kind, path, values) from error
