"""Starting worker processes and watching them."""
