"""How far numbers may lie apart, by precision, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Bounds.

    Attributes:
        loss: relative to the loss.
        norm: relative to the gradient norm.
        gradient: of an element, relative to the largest gradient of the whole model in that step.
        ratio: of a whole tensor: how far its best-fitting factor may lie from 1.
        replica: between ranks that hold the same elements, relative as `gradient`.
        weight: rounding of one weight, relative to the largest weight of its tensor.
        reason: why these numbers.
    """

    loss: float
    norm: float
    gradient: float
    ratio: float
    replica: float
    weight: float
    reason: str


_FP32 = Tolerance(
    loss=1e-6,
    norm=1e-5,
    gradient=1e-5,
    ratio=1e-3,
    replica=1e-5,
    weight=1e-6,
    reason="fp32: sums in another order differ by a few units of the last of 24 bits (6e-8), layers add them up",
)
_FP64 = Tolerance(
    loss=1e-6,
    norm=1e-10,
    gradient=1e-10,
    ratio=1e-6,
    replica=1e-10,
    weight=1e-13,
    reason="fp64: as fp32 with 53 bits; the loss is reported in fp32",
)


def _half(name: str, bits: int, true: bool) -> Tolerance:
    """Products in a half precision of so many significant bits; `true`: parameters and gradients too."""
    unit = 2.0**-bits
    return Tolerance(
        loss=4 * unit if true else unit,
        norm=2 * unit,
        gradient=16 * unit,
        ratio=2 * unit,
        replica=16 * unit if true else _FP32.replica,
        weight=2 * unit if true else _FP32.weight,
        reason=f"{name}: products are rounded to {bits} bits (u = {unit:.1e}) and micro-batches round anew: "
        f"loss {'4 u (it is rounded itself)' if true else 'u (a mean over many tokens)'}, elements 16 u of the largest gradient, "
        "whole tensors 2 u",
    )


_BF16_BITS, _FP16_BITS = 8, 11


def tolerance_of(precision: str) -> Tolerance:
    """The bounds for Lightning's `precision`.

    >>> tolerance_of("32-true").loss, tolerance_of("bf16-mixed").gradient
    (1e-06, 0.0625)
    """
    word = str(precision).lower()
    if word.startswith(("bf16", "16")):
        return _half(word, _BF16_BITS if word.startswith("bf16") else _FP16_BITS, "true" in word)
    return _FP64 if word.startswith("64") else _FP32
