"""How parameters, gradients and optimizer states lie over the data-parallel ranks: one file a sharding."""
