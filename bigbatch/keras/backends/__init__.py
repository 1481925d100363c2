"""One `train_step` for each of Keras's backends, on top of the framework folders."""
