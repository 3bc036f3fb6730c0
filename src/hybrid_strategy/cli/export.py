"""`hybrid export CHECKPOINT OUT`: the weights of a checkpoint as a file (safetensors, Lightning's) or a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_strategy.checkpoint.folder import PLAN_FILE
from hybrid_strategy.config.resume import good_checkpoint
from hybrid_strategy.errors import ConfigError, did_you_mean, message
from hybrid_strategy.files import read_json
from hybrid_strategy.units import format_bytes, parse_bytes

_SUFFIX, _LIGHTNING = ".safetensors", ".ckpt"
_SHARD = "5GB"
_NAMES = ("hf", "own")


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    given = _parser().parse_args(list(arguments))
    checkpoint = _checkpoint(Path(given.checkpoint).expanduser())
    report = _export(checkpoint, Path(given.out).expanduser(), given)
    print(f"{checkpoint}\n-> {report.path}: {format_bytes(report.num_bytes)}")
    for name, tensors in report.files.items():
        print(f"  {name}: {len(tensors)} tensors")
    weights = [key for key in report.left_out if key.startswith("model.")]
    print(f"left out: {len(report.left_out) - len(weights)} tensors of the optimizer and of averages")
    for key in weights:
        print(f"left out: {key}, which has no place there")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="hybrid export",
        description="Writes the weights of a checkpoint: as safetensors, one tensor in memory at a time (a file, or a folder "
        f"with config.json), or with all of them in memory as a file for Lightning's load_from_checkpoint ({_LIGHTNING}).",
        epilog="An average of weights (EMA), where the run had one, is what is exported. exit codes: 0 done, 1 the checkpoint is "
        "damaged or cannot be read, 2 there is none, or it has no counterpart in Hugging Face's library",
        allow_abbrev=False,
    )
    made.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder, or a run folder: its newest good one")
    made.add_argument("out", metavar="OUT", help=f"a file that ends in {_SUFFIX} or {_LIGHTNING}, or a folder")
    made.add_argument("--names", metavar="NAMES", help="hf: Hugging Face's, the default where it has such a model; own")
    made.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16; default: as it is in the checkpoint")
    made.add_argument("--shard-size", metavar="SIZE", help=f"largest file of a folder ({_SHARD})")
    return made


def _checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest good one of a run folder.

    Raises:
        ConfigError: there is none.
    """
    found = good_checkpoint(path, "CHECKPOINT")
    for line in found.skipped:
        print(f"skipped {line[0]}: {line[1]}", file=sys.stderr)
    if found.path is None or found.path.is_file():
        raise ConfigError(message("CHECKPOINT", str(path), "it is no checkpoint folder", "", "Set one, or a run folder"))
    return found.path


def _export(checkpoint: Path, out: Path, given: argparse.Namespace) -> Any:
    from hybrid_strategy.checkpoint.export import ExportOptions, export_file, export_folder
    from hybrid_strategy.checkpoint.naming import Naming

    if given.shard_size is not None and out.suffix in (_LIGHTNING, _SUFFIX):
        rule, advice = "a single file is not divided, so it would be ignored", "Leave it out, or set a folder for OUT"
        raise ConfigError(message("--shard-size", given.shard_size, rule, f"OUT is {out}", advice))
    if out.suffix == _LIGHTNING:
        return _for_lightning(checkpoint, out, given)
    model = (read_json(checkpoint / PLAN_FILE) or {}).get("model")
    known = _counterpart(model, given.names, checkpoint)
    naming, config = known if known is not None else (Naming(), None)
    options = ExportOptions(naming, _dtype(given.dtype), _shard_bytes(given.shard_size or _SHARD))
    if out.suffix == _SUFFIX:
        return export_file(checkpoint, out, options)
    if config is None:
        rule = "a Hugging Face folder needs names and a config.json that library knows"
        numbers = "the checkpoint does not tell of a model of one of the families" if model is None else ""
        raise ConfigError(message("OUT", str(out), rule, numbers, f"Set the path of a file that ends in {_SUFFIX}"))
    return export_folder(checkpoint, out, {**config, **_config_dtype(given.dtype)}, options)


def _for_lightning(checkpoint: Path, out: Path, given: argparse.Namespace) -> Any:
    from hybrid_strategy.strategy.from_checkpoint import write_single_file

    if given.names not in (None, "own"):
        raise ConfigError(message("--names", given.names, "a file of Lightning's has the module's own names", "", "Leave it out"))
    return write_single_file(checkpoint, out, _dtype(given.dtype))


def _counterpart(model: Any, names: str | None, checkpoint: Path) -> Any:
    """(naming, config) of Hugging Face's counterpart; None: names of the module's own.

    Raises:
        ConfigError: `names` asks for what there is not.
        ModelError: Hugging Face's class cannot be like this model.
    """
    from hybrid_strategy.registry import parts
    from hybrid_strategy.spec.model_shape import ModelShape
    from hybrid_strategy.strategy.initial_weights import foreign_naming

    if names not in (None, *_NAMES):
        raise ConfigError(message("--names", names, "there are no such names", "", did_you_mean(names, _NAMES)))
    if names == "own":
        return None
    family = None if model is None else parts("models").get(model["shape"]["family"])
    exchange = getattr(family, "exchange", None)
    if exchange is None:
        if names is None:
            return None
        rule = "the model of this checkpoint has no counterpart in Hugging Face's library"
        raise ConfigError(message("--names", names, rule, f"It is {checkpoint}", "Set --names own"))
    shape = ModelShape(**model["shape"])
    return foreign_naming(exchange, shape, model["name"], writes=True), exchange.config(shape, model["options"])


def _dtype(name: str | None) -> Any:
    import torch

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is None or name in kinds:
        return kinds.get(name or "")
    raise ConfigError(message("--dtype", name, "weights are not exported in it", "", did_you_mean(name, kinds)))


def _config_dtype(name: str | None) -> dict[str, str]:
    return {} if name is None else {"torch_dtype": name, "dtype": name}


def _shard_bytes(text: str) -> int:
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(message("--shard-size", text, "it is no size", str(error), "Set e.g. 5GB")) from error
    if found < 1:
        raise ConfigError(message("--shard-size", text, "a file holds at least one byte", "", "Set e.g. 5GB"))
    return found
