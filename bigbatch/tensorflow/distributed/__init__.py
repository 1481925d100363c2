"""Training on the replicas of a tf.distribute strategy."""
