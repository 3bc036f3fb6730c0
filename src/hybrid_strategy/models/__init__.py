"""Model families: one file each, with its shape, units and tensor-parallel plan."""
