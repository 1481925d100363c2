"""`python -m bigbatch`."""

from .cli import main

main()
