"""Hand-written TensorFlow training, as documented for Horovod: what the workers of the tests run."""

from __future__ import annotations

from typing import Any

STEPS = 30


def train(steps: int, holds: dict[int, int | str]) -> dict[str, Any]:
    """A net in float64 with an embedding, trained by a tf.function. Each step's batch follows from the step alone and
    is the same on all ranks, so that the final weights are those of one process, whatever the world did.

    holds: what `hold` awaits before those steps.
    """
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import spark_elastic.tensorflow as hvd
    from tests.component.tensorflow.loops import batch_of, check_graph, net, train_plain
    from tests.component.torch.hand_written import hold

    hvd.init()
    keras.utils.set_random_seed(7 + hvd.rank())  # what rank 0 begins with counts, for newcomers too
    model = net()
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9))
    initial = [weight.numpy() for weight in model.weights]
    trained: list[int] = []
    resets: list[int] = []

    @tf.function
    def training_step(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(labels - model(ids, training=True)))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss, op=hvd.Sum), hvd.size_op()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.batch < steps:
            hold(state, holds.get(state.batch))
            time.sleep(0.05)
            ids, labels = batch_of(state.batch)
            total, size = training_step(tf.constant(ids), tf.constant(labels))
            assert int(size) == hvd.size()
            assert np.isfinite(float(total))
            trained.append(state.batch)
            state.batch += 1
            print(f"step {state.batch}", flush=True)  # noqa: T201 - what the test waits for
            state.commit()

    state: Any = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, initial=initial)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    loop(state)
    check_graph()
    return {
        "rank": hvd.rank(),
        "weights": [weight.numpy() for weight in model.weights],
        "slots": [variable.numpy() for variable in optimizer.variables],
        "trained": trained,
        "plain": train_plain(state.initial, steps) if hvd.rank() == 0 else None,
        "resets": resets,
    }


def check_graph() -> None:
    """Operations in one graph against numpy; most have no name, and none waits for another's result."""
    import numpy as np
    import tensorflow as tf

    import spark_elastic.tensorflow as hvd

    size, rank = hvd.size(), hvd.rank()
    all_rows = np.arange(size * 6, dtype=np.float32).reshape(size, 3, 2)

    @tf.function
    def graph(rows: Any) -> Any:
        big = tf.ones([300_000]) * rows[0, 0]
        return {
            "sum": hvd.allreduce(rows, op=hvd.Sum),
            "gathered": hvd.allgather(rows[: hvd.rank_op() + 1]),
            "root": hvd.broadcast(rows, size - 1),
            "scattered": hvd.reducescatter(tf.tile(rows, [size, 1]), op=hvd.Max),
            "swapped": hvd.alltoall(tf.tile(rows, [size, 1])),
            "group": hvd.grouped_allreduce([rows, big], op=hvd.Average, name="group"),
            "narrow": hvd.allreduce(tf.cast(rows, tf.bfloat16), op=hvd.Max),
            "given": rows,
        }

    for _ in range(2):
        got = tf.nest.map_structure(lambda t: t.numpy(), graph(tf.constant(all_rows[rank])))
        assert np.array_equal(got["sum"], all_rows.sum(0))
        assert np.array_equal(got["gathered"], np.concatenate([all_rows[r][: r + 1] for r in range(size)]))
        assert np.array_equal(got["root"], all_rows[-1])
        assert np.array_equal(got["scattered"], all_rows[-1])
        assert np.array_equal(got["swapped"], np.concatenate(list(all_rows)))
        assert np.allclose(got["group"][0], all_rows.mean(0))
        assert np.allclose(got["group"][1], all_rows[:, 0, 0].mean())
        assert np.array_equal(got["narrow"].astype(np.float32), all_rows[-1])
        assert np.array_equal(got["given"], all_rows[rank])
    join = tf.function(hvd.join)
    for last in range(2):  # each run of the graph joins
        if rank == last:
            assert hvd.allreduce(tf.constant(2.0), op=hvd.Sum, name=f"by {last}").numpy() == 2.0
        assert join().numpy() == last
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=float(rank))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(1))
        assert session.run(variable) == 1.0


def net() -> Any:
    """Embedding and two layers, in float64."""
    import keras

    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 3, dtype="float64")(ids))
    hidden = keras.layers.Dense(4, activation="tanh", dtype="float64")(rows)
    return keras.Model(ids, keras.layers.Dense(1, dtype="float64")(hidden))


def train_plain(initial: list[Any], steps: int) -> list[Any]:
    """The weights that the same training has in one process."""
    import keras
    import tensorflow as tf

    model = net()
    model.set_weights(initial)
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9))

    @tf.function  # as in `train`: Keras's schedules compute in float32, and TensorFlow rounds a graph's otherwise
    def training_step(ids: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(labels - model(ids, training=True)))
        # Dense, since Keras's Adam takes a row that is listed twice for two.
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for step in range(steps):
        training_step(*map(tf.constant, batch_of(step)))
    return [weight.numpy() for weight in model.weights]


def batch_of(step: int) -> tuple[Any, Any]:
    """(ids of 6 rows, labels)"""
    import numpy as np

    draw = np.random.default_rng(step)
    return draw.integers(0, 9, (6, 2)).astype(np.int32), draw.normal(size=(6, 1))


def fit(epochs: int, steps: int, lost: int, joined: int) -> dict[str, Any]:
    """`model.fit` with Horovod's callbacks on either backend of Keras. Each rank trains its share of every step's rows,
    so that only exchanged gradients give the weights of one process.

    lost, joined: steps that are not taken before a second world is there, and before it has two workers.
    """
    import sys
    import time

    import keras

    import spark_elastic.keras as hvd
    from tests.component.tensorflow.loops import iterate_shares, net
    from tests.component.torch.hand_written import await_size, hold

    hvd.init()
    keras.utils.set_random_seed(7 + hvd.rank())  # what rank 0 begins with counts, for newcomers too
    model = net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
    state: Any = hvd.elastic.KerasState(model, batch=0, epoch=0, initial=model.get_weights())
    told: dict[str, list[Any]] = {"trained": [], "rates": [], "own": [], "average": []}

    class SlowSteps(keras.callbacks.Callback):  # type: ignore[misc] # untyped
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            step = state.epoch * steps + state.batch
            hold(state, 2 if step == lost else None)
            await_size(state, 2 if step >= joined else 1)
            told["rates"].append(float(model.optimizer.learning_rate))
            time.sleep(0.05)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            told["trained"].append(state.epoch * steps + state.batch)
            print(f"step {told['trained'][-1] + 1}", flush=True)  # noqa: T201 - what the test waits for

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            told["own"].append(logs["loss"])

    @hvd.elastic.run
    def loop(state: Any) -> None:
        history = model.fit(
            iterate_shares(state.epoch * steps + state.batch, hvd.rank(), hvd.size()),
            initial_epoch=state.epoch,
            epochs=epochs,
            steps_per_epoch=steps,
            verbose=0,
            callbacks=[
                hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
                SlowSteps(),
                hvd.callbacks.MetricAverageCallback(),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ],
        )
        told["average"] = history.history["loss"]

    loop(state)
    alone = net()
    if hvd.rank() == 0:
        alone.set_weights(state.initial)
        alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        warm = hvd.callbacks.LearningRateScheduleCallback(
            0.05, lambda epoch: (epoch + 1 / steps + 1) / 2, end_epoch=1, staircase=False
        )  # as for two workers
        rows = iterate_shares(0, 0, 1)
        alone.fit(rows, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=[warm])
    return told | {
        "weights": model.get_weights(),
        "slots": [keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables],
        "plain": alone.get_weights(),
        "position": (state.epoch, state.batch),
        "tensorflow": "spark_elastic.tensorflow" in sys.modules,
    }


def iterate_shares(step: int, rank: int, size: int) -> Any:
    """That rank's rows of all batches from that one on."""
    while True:
        ids, labels = batch_of(step)
        yield ids[rank::size], labels[rank::size]
        step += 1
