"""What this machine reaches: kernels, links, and a few steps of reference runs."""
