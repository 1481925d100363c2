"""`fit` on data that come in micro-batches: a window of them makes up one step."""
