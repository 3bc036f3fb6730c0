"""The reference: plain Lightning on one device. Nothing of the step engine, the transforms or the sharding takes part."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from hybrid_strategy.checkpoint.pieces import Piece, model_key
from hybrid_strategy.data.loader import mesh_dataloader
from hybrid_strategy.parallel.materialise import Initialiser
from hybrid_strategy.strategy import _lightning
from hybrid_strategy.strategy.initial_weights import Receiver, fill_weights
from hybrid_strategy.strategy.options import Options
from hybrid_strategy.strategy.run_seed import run_seed
from hybrid_strategy.strategy.target import find_target


class OneProcessStrategy(SingleDeviceStrategy):
    """Lightning's strategy for one device, with the samples and the first values of a layout.

    It reads at once what `data_parallel_size` ranks would read together, and gives parameters on the meta device the values that
    every layout gives them. Forward, backward, clipping and the optimizer's step are Lightning's own.

    Args:
        device: where the module lives.
        data_parallel_size: batches of the loader that make one batch here.
        options: the strategy's: `module` decides how first values are keyed, `seed` and `initial_weights` what they are.
    """

    materialises_meta = True

    def __init__(self, device: torch.device, data_parallel_size: int, options: Options) -> None:
        super().__init__(device)
        self._copies, self._options = data_parallel_size, options

    def setup_environment(self) -> None:
        super().setup_environment()
        # Lightning's strategies for several processes do so: `configure_model` draws the same whatever was drawn before
        _lightning.reset_seed()

    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None  # set by the Trainer before
        target = find_target(module, self._options.module)
        give_first_values(module, target, run_seed(self._options.seed))
        if self._options.initial_weights is not None:
            _begin_with(self._options.initial_weights, module, target)
        super().model_to_device()

    def process_dataloader(self, dataloader: object) -> Any:
        return mesh_dataloader(dataloader, 1, 0, seed=run_seed(self._options.seed), batch_multiplier=self._copies)


def _begin_with(path: str, module: pl.LightningModule, target: str) -> None:
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in module.state_dict()}
    weights = {**dict(module.named_parameters()), **buffers}
    pieces = {model_key(name): Piece.whole(name, value.data) for name, value in weights.items()}
    names = tuple(name for name, _ in module.named_parameters(remove_duplicate=False))
    fill_weights(path, Receiver(module, target, names, pieces, module.strict_loading))


def give_first_values(module: pl.LightningModule, target: str, seed: int) -> None:
    """Makes parameters of `module` on the meta device real, in place; those of `target` are keyed by their names in it."""
    root = module.get_submodule(target) if target else module
    inner, outer = Initialiser(root, seed), Initialiser(module, seed)
    inside = {id(parameter): name for name, parameter in root.named_parameters()}
    real: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            known = inside.get(id(parameter))
            values = outer.whole(name) if known is None else inner.whole(known)
            real[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for each in module.modules():
        for key, old in list(each.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(each, key, real.get(id(old), old))
