"""The built-in tasks in PyTorch."""
