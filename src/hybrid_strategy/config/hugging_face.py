"""`model=hf model.config=...`: the sizes of a model from a Hugging Face `config.json`, and whether ours is the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.planning.hf_config import shape_from_config

_DIFFERENT = {
    "rope_scaling": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1.0),
}
"""Key -> the values with which our family `llama` is the same model."""


def with_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `model`, with those of its `config` filled in where they are not given.

    A run trains our own family `llama` of the same sizes; a file that says more than that names another family, which can be
    planned but not trained.

    Raises:
        ConfigError: there is no such file, or it is none of a model.
        ModelError: a size that it does not tell, or a model of experts.
    """
    path = values.get("config")
    if not path or "hidden_size" in values:
        return dict(values)
    file = Path(str(path)).expanduser().absolute()
    file = file / "config.json" if file.is_dir() else file
    found = _read(str(path), file)
    shape = asdict(shape_from_config(found, values.get("sequence_length")))
    return {**shape, **_options(found, shape), **values, "config": str(file)}


def _read(path: str, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        rule, advice = "it must be a Hugging Face config.json", "Set the path of the file or of the folder it lies in"
        raise ConfigError(message("model.config", path, rule, str(error), advice)) from error
    if not isinstance(found, dict):
        raise ConfigError(message("model.config", path, "it must hold a mapping", "", "Set a Hugging Face config.json"))
    return found


def _options(found: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Options of our `llama`, or a family's name that says what differs."""
    if shape["family"] != "llama":
        return {"family": f"{shape['family']} of Hugging Face"}
    more = [f"{key}={found[key]}" for key, same in _DIFFERENT.items() if found.get(key) not in same]
    if more:
        return {"family": f"llama with {', '.join(more)}"}
    names = {"rope_theta": "rope_theta", "rms_norm_eps": "norm_eps"}
    return {"options": {ours: found[key] for key, ours in names.items() if found.get(key) is not None}}
