"""Dropout is switched off in both runs: a layout draws other masks than one process, so no two numbers would agree."""

from __future__ import annotations

from torch import nn

_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ATTRIBUTES = ("dropout", "dropout_p", "attention_dropout")


def switch_off_dropout(module: nn.Module) -> int:
    """Sets every dropout probability that can be found to 0; returns how many modules had one."""
    found = 0
    for each in module.modules():
        names = ("p",) if isinstance(each, _LAYERS) else _ATTRIBUTES
        own = vars(each)
        active = [name for name in names if isinstance(own.get(name), float) and own[name] > 0]
        for name in active:
            setattr(each, name, 0.0)
        found += bool(active)
    return found
