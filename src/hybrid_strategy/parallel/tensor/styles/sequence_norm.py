"""`sequence_norm`: a module that works token by token outside the region, such as a norm on the residual stream.

Without sequence parallelism every rank does the same work on the same activations. With it each rank sees its part of the
sequence, so the gradients of the module's parameters are partial sums (arXiv:2205.05198 section 4.2.2).
"""

from __future__ import annotations

from hybrid_strategy.parallel.tensor.styles._style import Style


class SequenceNorm(Style):
    name = "sequence_norm"


PART = SequenceNorm()
