"""Tensor-parallel styles: one file each."""
