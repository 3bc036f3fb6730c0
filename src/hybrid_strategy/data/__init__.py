"""Text, tokens and the order of samples."""
