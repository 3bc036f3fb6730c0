"""Hydra configuration: schema, composition, validation."""
