"""Weights to begin with: Hugging Face's safetensors, Lightning's single file, a checkpoint; each rank reads its part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hybrid_strategy.checkpoint.agreement import Ranks, Work
from hybrid_strategy.checkpoint.certificate import Certificate
from hybrid_strategy.checkpoint.folder import MANIFEST_FILE, resolve
from hybrid_strategy.checkpoint.importing import ImportOptions, import_safetensors, import_single_file, names_in
from hybrid_strategy.checkpoint.loading import LoadOptions, load_checkpoint
from hybrid_strategy.checkpoint.naming import Naming, bare_name
from hybrid_strategy.checkpoint.pieces import Piece, model_key
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.registry import parts
from hybrid_strategy.spec.exchange import Exchange, ForeignTensor
from hybrid_strategy.spec.model_shape import ModelShape


@dataclass(frozen=True)
class Receiver:
    """What takes the weights.

    Attributes:
        module: the LightningModule.
        target: name of the submodule that is parallelised; empty: the module itself.
        names: of all parameters of the whole module, the same on all ranks.
        tensors: this rank's weights and buffers by key.
        strict: names that do not match are an error; otherwise they are named.
    """

    module: nn.Module
    target: str
    names: tuple[str, ...]
    tensors: Mapping[str, Piece]
    strict: bool = True


def fill_weights(path: str, receiver: Receiver) -> Certificate:
    """Fills this rank's pieces. Called by every rank.

    Args:
        path: a folder of safetensors files (with or without an index), one such file, a single-file Lightning checkpoint, or a
            checkpoint folder of this package. Names are those of the family's Hugging Face class, of the parallelised submodule
            or of the whole module: whichever most of them are.

    Raises:
        CheckpointError: on every rank: it cannot be read, or is of another model.
    """
    where = resolve(Path(path).expanduser())
    if (where / MANIFEST_FILE).is_file():
        return load_checkpoint(where, receiver.tensors, LoadOptions(strict=receiver.strict)).certificate
    if where.is_file() and where.suffix != ".safetensors":
        return import_single_file(where, receiver.tensors, ImportOptions(strict=receiver.strict))[1]
    naming = _likeliest(names_in(where), receiver) if where.exists() else Naming()
    certificate = import_safetensors(where, receiver.tensors, ImportOptions(naming, receiver.strict))
    # After the tensors: names and shapes that differ say more than sizes do.
    differences = Ranks.of(None).lead(Work(str(where), "import"), lambda: _differences(where, receiver))
    if differences and receiver.strict:
        rule = "its config.json is of another model, so that the weights would compute other values here"
        advice = "Set the model to it, or strict_loading=False"
        raise CheckpointError(message("initial_weights", path, rule, "; ".join(differences), advice))
    for line in differences:
        certificate = certificate.with_not_restored("config.json", line)
    for name in (name for name in receiver.names if naming.rename(model_key(name)) is None):
        certificate = certificate.with_not_restored(name, "the files have no place for it; it keeps its first value")
    return certificate


def _likeliest(there: set[str], receiver: Receiver) -> Naming:
    def known(naming: Naming) -> int:
        return sum(naming.rename(model_key(name)) in there for name in receiver.names)

    return max(_namings(receiver), key=known)


def _differences(folder: Path, receiver: Receiver) -> list[str]:
    """What `config.json` beside the weights says otherwise than the model."""
    root, exchange = _family_of(receiver)
    file = (folder if folder.is_dir() else folder.parent) / "config.json"
    if exchange is None or not file.is_file():
        return []
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(message("config.json", str(file), "it cannot be read", str(error), "")) from error
    if exchange.architecture not in (given.get("architectures") or ()):
        return []  # of another program's making, or of a class that is only like this one
    return exchange.differences(given, root.shape, root.options)


def _family_of(receiver: Receiver) -> tuple[Any, Exchange | None]:
    root = receiver.module.get_submodule(receiver.target) if receiver.target else receiver.module
    return root, next((part.exchange for part in parts("models").values() if part.matches(root)), None)


def _namings(receiver: Receiver) -> Iterable[Naming]:
    root, exchange = _family_of(receiver)
    if exchange is not None:
        yield foreign_naming(exchange, root.shape, receiver.target)
    prefix = f"{receiver.target}." if receiver.target else ""
    yield Naming(lambda key: (bare_name(key) or "").removeprefix(prefix) or None)
    yield Naming()


def foreign_naming(exchange: Exchange, shape: ModelShape, target: str, writes: bool = False) -> Naming:
    """The names of a family's counterpart.

    Args:
        target: name of the model in the LightningModule.
        writes: for export: what lies there under another name already has no place of its own.
    """
    prefix = f"{target}." if target else ""

    def there(key: str) -> ForeignTensor | None:
        name = bare_name(key)
        inside = name is not None and name.startswith(prefix)
        found = exchange.tensor(str(name).removeprefix(prefix), shape) if inside else None
        return None if found is None or (writes and found.again) else found

    def told(what: Callable[[ForeignTensor], Any], otherwise: Any) -> Callable[[str], Any]:
        def tell(key: str) -> Any:
            found = there(key)
            return otherwise if found is None else what(found)

        return tell

    return Naming(
        rename=told(lambda each: each.name, None),
        transposed=told(lambda each: each.transposed, False),
        part=told(lambda each: each.part, (0, 1)),
    )


def describe_model(root: nn.Module, target: str) -> dict[str, Any] | None:
    """What a checkpoint says of a model of one of the families, so that it can be exported without the run's configuration."""
    shape, options = getattr(root, "shape", None), getattr(root, "options", None)
    if not isinstance(shape, ModelShape) or not isinstance(options, Mapping):
        return None
    return {"name": target, "shape": vars(shape), "options": dict(options)}
