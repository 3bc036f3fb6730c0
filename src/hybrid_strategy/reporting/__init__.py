"""What a run shows: plan table, closing summary."""
