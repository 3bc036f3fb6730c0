"""The Lightning strategy: the shell, the step, routed logging, precision."""
