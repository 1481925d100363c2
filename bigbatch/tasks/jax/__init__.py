"""The built-in tasks in JAX: parameters are plain dicts of arrays."""
