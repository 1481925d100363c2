"""A training run on the command line, with its folder, its display and its signals."""
