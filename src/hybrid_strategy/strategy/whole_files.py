"""Files that are made of a whole model: a rank that holds a part of it must not write them, for they would look complete."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.spec.layout import Layout

_NAME = "save_pretrained"


def refuse_partial_files(module: nn.Module, layout: Layout) -> None:
    """From now on `save_pretrained` of Hugging Face models in `module` is refused, where ranks of the layout hold parts."""
    if max(layout.state_shards, layout.tensor_parallel_size, layout.pipeline_parallel_size) == 1:
        return
    for each in module.modules():
        if callable(getattr(type(each), _NAME, None)):
            object.__setattr__(each, _NAME, partial(_refuse, layout.name))


def _refuse(layout: str, *_arguments: Any, **_options: Any) -> None:
    rule = "no rank of this layout has the whole model, and the file would look as if it had"
    advice = "Save a checkpoint (trainer.save_checkpoint) and make a folder of it: hybrid export CHECKPOINT FOLDER"
    raise ModelError(message(_NAME, "called on a part of the model", rule, f"The layout is {layout}", advice))
