"""Arithmetic without torch: table simulation, balance, layout checks, learning rate, memory, communication, step time."""
