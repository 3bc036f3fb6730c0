"""LightningModules and LightningDataModules that the command line trains."""
