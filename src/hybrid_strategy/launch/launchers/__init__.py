"""Launchers: one file each, a `PART` with a name and `run(job)`."""
