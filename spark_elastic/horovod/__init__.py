"""Horovod's interface: operations by name, optimizers, callbacks and states for torch, TensorFlow and Keras."""
