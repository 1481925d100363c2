"""One engine for each framework: `bigbatch train` and `bigbatch verify` use it."""
