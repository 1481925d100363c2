"""The sizes of the models for a GPU, in PyTorch and in JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """The size of a transformer."""

    layers: int
    width: int
    heads: int
    length: int
    """Tokens of a text, or patches of an image."""
    classes: int
    """The size of the vocabulary, or the number of image classes."""


GPT2_SMALL = Size(layers=12, width=768, heads=12, length=1024, classes=50257)
TINY_GPT = Size(layers=4, width=128, heads=4, length=64, classes=512)
SMALL_VIT = Size(layers=12, width=384, heads=6, length=196, classes=1000)
REHEARSAL = Size(layers=2, width=32, heads=2, length=16, classes=64)
PATCH = 16
"""Pixels along each side."""

GPT2, TINY = "GPT-2 small, 1024 tokens", "tiny GPT (4×128, 64 tokens)"
BATCH_SIZE, MICRO_BATCH_SIZE = 64, 8
