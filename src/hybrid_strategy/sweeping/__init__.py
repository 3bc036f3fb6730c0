"""Sweeps: which points there are, running them here or on Slurm, what came of each."""
