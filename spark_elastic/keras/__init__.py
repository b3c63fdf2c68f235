"""Keras 3 on the TensorFlow backend."""
