"""Context parallelism on plain tensors: every rank works on its part of each sequence, attention sees the whole of it."""
