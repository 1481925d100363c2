"""The built-in tasks in Keras, on all of its backends."""
