"""Tensor and sequence parallelism on plain tensors: every rank holds slices, collectives are autograd functions."""
