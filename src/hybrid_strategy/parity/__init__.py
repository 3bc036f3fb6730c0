"""The parity gate: does a layout give the numbers of one process? Runs both and compares everything."""
