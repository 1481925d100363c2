"""The report of a run: one HTML page, its tables and its plots."""
