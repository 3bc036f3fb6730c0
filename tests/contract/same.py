"""Is what a layout saw the same as what one process saw?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 2e-7
"""Half of float32's last digit is 6e-8; a value is a few operations away from the samples."""


def differences(wanted: Any, got: Any, relative: float = RELATIVE, path: str = "") -> Iterator[str]:
    """Where two nested records differ; numbers may by rounding."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        for key in wanted.keys() | got.keys():
            if key not in got or key not in wanted:
                yield f"{path}.{key} is {'missing' if key not in got else 'too much: ' + repr(got[key])}"
            else:
                yield from differences(wanted[key], got[key], relative, f"{path}.{key}")
    elif isinstance(wanted, (list, tuple)) and isinstance(got, (list, tuple)):
        yield from _sequences(wanted, got, relative, path)
    elif isinstance(wanted, float) and isinstance(got, (float, int)):
        same = math.isclose(wanted, got, rel_tol=relative, abs_tol=ABSOLUTE) or (math.isnan(wanted) and math.isnan(got))
        if not same:
            yield f"{path} is {got!r}, not {wanted!r}"
    elif wanted != got:
        yield f"{path} is {got!r}, not {wanted!r}"


def _sequences(wanted: Sequence[Any], got: Sequence[Any], relative: float, path: str) -> Iterator[str]:
    if len(wanted) != len(got):
        extra = [each for each in got if each not in wanted][:5]
        lost = [each for each in wanted if each not in got][:5]
        yield f"{path} has {len(got)} entries, not {len(wanted)} (too much: {extra}, lost: {lost})"
        return
    for index, (left, right) in enumerate(zip(wanted, got, strict=True)):
        yield from differences(left, right, relative, f"{path}[{index}]")
