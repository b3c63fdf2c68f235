"""What `transform` does: columns as a model takes them, the model in Spark's workers, columns of its outputs."""
