"""A PyTorch Lightning strategy for data, tensor, sequence and pipeline parallelism with a sharded optimizer."""
