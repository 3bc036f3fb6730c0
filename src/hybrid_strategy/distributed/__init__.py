"""torch.distributed: process group, mesh, random state, gradient norm."""
