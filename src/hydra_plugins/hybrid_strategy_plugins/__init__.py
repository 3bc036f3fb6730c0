"""Hydra finds plug-ins by this name; thin doors only."""
