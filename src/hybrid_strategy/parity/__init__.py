"""The parity gate: a layout's numbers against one process."""
