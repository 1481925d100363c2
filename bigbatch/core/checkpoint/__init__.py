"""Checkpoints, in files that hold no code: store.py has the format, loop.py the loop."""

from .store import Store as Store
