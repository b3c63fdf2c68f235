"""A TensorFlow loop written by hand, made elastic by a state and a decorator.

    spark-elastic-run -np 2 --min-np 1 python examples/tf_elastic.py [batches]

Scripts written for Horovod look the same but for the import of `hvd`. Workers may join, leave and die at any time: a
loss goes back to the last commit, a planned change continues from where it is. `spark_elastic.run` takes the same loop
as a function, and runs it on Spark.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

import spark_elastic.tensorflow as hvd

BATCHES = int(sys.argv[1]) if len(sys.argv) > 1 else 60
BATCH_SIZE = 32
RATE = 0.01

hvd.init()
tf.keras.utils.set_random_seed(1)
inputs = tf.random.normal([2048, 8])
targets = tf.reduce_sum(inputs, axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).repeat().shuffle(512, seed=hvd.rank())
dataset = dataset.batch(BATCH_SIZE)

model = tf.keras.Sequential(
    [tf.keras.Input((8,)), tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(1)]
)
optimizer = tf.keras.optimizers.SGD(RATE * hvd.size(), momentum=0.9)


@tf.function
def training_step(x: Any, y: Any) -> Any:
    """The loss of this worker's batch, before the step."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@hvd.elastic.run
def train(state: Any) -> None:
    for x, y in dataset.skip(state.batch).take(BATCHES - state.batch):
        loss = training_step(x, y)
        state.batch += 1
        if state.batch % 10 == 0:
            average = float(hvd.allreduce(loss))
            if hvd.rank() == 0:
                print(f"batch {state.batch}: loss {average:.4f} on {hvd.size()} workers", flush=True)
        state.commit()


def on_state_reset() -> None:
    """The world has another size."""
    optimizer.learning_rate = RATE * hvd.size()


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
