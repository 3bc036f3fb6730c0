"""First values of a whole model in one process: those that every layout of the strategy gives, bit for bit."""

from __future__ import annotations

import torch
from torch import nn

from hybrid_strategy.parallel.materialise import Initialiser


def give_first_values(model: nn.Module, seed: int, device: torch.device) -> None:
    """Makes the parameters of `model`, all on the meta device, real on `device` and fills them, in place.

    Tied parameters stay tied and take the values of their first name. torch's own random state is left as it was.
    """
    initialiser = Initialiser(model, seed)
    names = {parameter: name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    real = {parameter: _real(parameter, initialiser.whole(name), device) for parameter, name in names.items()}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, real[parameter])


def _real(parameter: nn.Parameter, values: torch.Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(values.to(device), requires_grad=parameter.requires_grad)
