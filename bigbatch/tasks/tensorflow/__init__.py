"""The built-in tasks in TensorFlow, with layers of Keras."""
