"""Gradients that a step takes itself, such as for a penalty on them: what cannot be differentiated again says so."""

from __future__ import annotations

import torch

from hybrid_strategy.errors import ModelError, message


def makes_graph() -> bool:
    """Does the backward pass at hand make a graph of its own (`create_graph`)?"""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def refuse_second_order(rule: str, advice: str) -> None:
    """Raises ModelError where the backward pass at hand makes a graph of its own."""
    if makes_graph():
        raise ModelError(message("create_graph", True, rule, "", advice))
