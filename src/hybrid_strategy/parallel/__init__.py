"""Transforms of a model: stages, tensor parallelism, activation checkpointing, sharding; and the player of schedule tables."""
