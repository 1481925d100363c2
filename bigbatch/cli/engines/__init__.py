"""One engine for each framework: what `bigbatch train` and `bigbatch verify` ask of it."""
