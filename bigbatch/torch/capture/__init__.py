"""Micro-batches as CUDA graphs: recorded once, then replayed."""
