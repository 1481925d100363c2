"""Compares the accumulated gradient with that of the full batch, and names the cause where they differ."""
