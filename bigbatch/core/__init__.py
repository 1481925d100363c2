"""The part of bigbatch that knows no framework."""
