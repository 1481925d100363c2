"""What is kept of a run, in files that hold no code: see store.py for the format and loop.py for the loop."""

from .store import Store as Store
