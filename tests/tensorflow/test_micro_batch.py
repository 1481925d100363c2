"""`micro_batch()` in the user's own loop, and what the accumulator answers to names of other frameworks."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import OptionError, OrderError, windows
from bigbatch.tensorflow import Accumulator

from .test_distribute import full_batch, make_batch, make_model, micro_batches
from .training import cut, flat, mirrored

pytestmark = pytest.mark.usefixtures("float64")


def loss(model: Any, batch: Any) -> Any:
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return cross_entropy(batch["y"], model(batch["x"]))


def make(**options: Any) -> Accumulator:
    return Accumulator(make_model(), keras.optimizers.SGD(0.1), **{"accumulation_steps": 3, **options})


def expected(*batches: Any) -> np.ndarray:
    return flat(full_batch(make_model(), keras.optimizers.SGD(0.1), list(batches), loss))


def test_a_loop_in_eager_code() -> None:
    accumulator, batch = make(), make_batch(13)
    steps = []
    for part in cut(batch, 3):  # 3, 3, 3 and then 3, 1
        with accumulator.micro_batch(weight=len(part["y"])) as micro:
            micro.backward(loss(accumulator.model, part))
        steps.append(micro.step)
    assert [step is not None for step in steps] == [False, False, True, False, False]
    assert steps[2].weight == 9
    assert accumulator.flush().weight == 4
    halves = [{name: rows[where] for name, rows in batch.items()} for where in (slice(0, 9), slice(9, 13))]
    np.testing.assert_allclose(flat(accumulator.model), expected(*halves), rtol=1e-12)


@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_loop_in_a_graph_and_on_replicas(is_distributed: bool) -> None:
    """Keras's losses divide by the number of replicas, except in the block."""
    batch = make_batch(10)
    if is_distributed:
        with mirrored().scope():
            accumulator = make()
    else:
        accumulator = make()

    def on_replica(part: Any) -> None:
        with accumulator.micro_batch(weight=tf.shape(part["y"])[0]) as micro:
            micro.backward(loss(accumulator.model, part))

    feed = tf.function(lambda part: accumulator.strategy.run(on_replica, args=(part,)), reduce_retracing=True)
    for part in micro_batches(batch, (6, 4), 2) if is_distributed else cut(batch, 4):
        feed(part)
    assert accumulator.last_step.weight == 10
    np.testing.assert_allclose(flat(accumulator.model), expected(batch), rtol=1e-12)


def test_the_loss_is_scaled() -> None:
    keras.config.set_floatx("float32")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**10)
    accumulator, batch = Accumulator(make_model(), optimizer, accumulation_steps=4), make_batch(13)
    for part in cut(batch, 4):
        with accumulator.micro_batch(weight=len(part["y"])) as micro:
            micro.backward(loss(accumulator.model, part))
    assert accumulator.last_step.loss == pytest.approx(float(loss(make_model(), batch)), rel=1e-5)
    np.testing.assert_allclose(flat(accumulator.model), expected(batch), rtol=1e-4, atol=1e-6)


def test_skipped_micro_batches_do_not_count() -> None:
    accumulator, batch = make(accumulation_steps=2), make_batch(9)
    for number, part in enumerate(cut(batch, 3)):
        with accumulator.micro_batch(weight=3) as micro:
            micro.skip() if number == 1 else micro.backward(loss(accumulator.model, part))
    assert micro.step.weight == 6
    kept = {name: np.delete(rows, slice(3, 6), 0) for name, rows in batch.items()}
    np.testing.assert_allclose(flat(accumulator.model), expected(kept), rtol=1e-12)


def test_wrong_order_is_refused() -> None:
    accumulator, part = make(), make_batch(3)
    with pytest.raises(OrderError, match=r"micro.backward\(loss\) was not called"), accumulator.micro_batch(weight=3):
        pass
    with accumulator.micro_batch(weight=3) as micro:
        micro.backward(loss(accumulator.model, part))
        with pytest.raises(OrderError, match="called twice"):
            micro.backward(1.0)
        with pytest.raises(OrderError, match=r"after micro\.backward"):
            micro.skip()
        with pytest.raises(OrderError, match="inside a micro_batch"):
            accumulator.flush()
    with pytest.raises(OrderError, match="after its block"):
        micro.backward(1.0)
    with accumulator.micro_batch(weight=3) as micro:
        micro.skip()
        with pytest.raises(OrderError, match=r"after micro\.skip"):
            micro.backward(1.0)
    with pytest.raises(ZeroDivisionError), accumulator.micro_batch(weight=3):
        raise ZeroDivisionError
    assert accumulator._window.num_micro_batches() == 1
    with pytest.raises(OptionError, match=r"micro_batch\(\) needs weight=…"), accumulator.micro_batch():
        pass
    with pytest.raises(OptionError, match=r"micro_batch\(\) does not know"):
        make(accumulation_steps=None).micro_batch(weight=3).__enter__()


def test_windows_are_those_of_all_frameworks() -> None:
    accumulator, batch = make(loss=loss), make_batch(13)
    steps = [accumulator.step(window) for window in windows(cut(batch, 3), 3)]
    assert [step.weight for step in steps] == [9, 4]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("backward", r"gradients\(batch\)"),
        ("apply_gradients", r"add\(gradients, weight=…\)"),
        ("zero_grad", "leave it out"),
        ("no_sync", "reduce once per window"),
        ("train_step", r"step\(batch\)"),
    ],
)
def test_names_of_other_frameworks_are_answered(name: str, remedy: str) -> None:
    with pytest.raises(AttributeError, match=rf"^Accumulator has no {name} in TensorFlow: .*{remedy}"):
        getattr(make(), name)
    assert not hasattr(make(), name)


def test_other_names_are_missing_as_always() -> None:
    with pytest.raises(AttributeError, match=r"^Accumulator has no stepp"):
        make().stepp  # noqa: B018
