"""Checkpoint folders keyed by the un-split model's parameter names."""
