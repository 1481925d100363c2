"""Non-finite gradients and losses: the step is skipped, an error is raised, or the run ends; the next step is exact."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import NonFiniteError, OptionError, OrderError, Step, Window
from bigbatch.tensorflow import Accumulator, train_with_accumulation
from tests.tensorflow.test_accumulator import (
    Batch,
    add,
    assert_exact_step,
    assert_untouched,
    gradients,
    loss,
    make,
    make_batch,
    make_model,
    parts,
    snapshot,
)
from tests.tensorflow.training import mirrored

pytestmark = pytest.mark.usefixtures("float64")
WAYS = ("batch", "window", "add")


def bad_batch() -> Batch:
    x, y = make_batch()
    x[6, 2] = np.nan
    return x, y


def feed(accumulator: Accumulator, way: str, batch: Batch) -> Step | None:
    if way == "batch":
        return accumulator.step(batch)
    if way == "window":
        return accumulator.step(Window(parts(batch)))
    for part in parts(batch):
        add(accumulator, part)
    return accumulator.last_step


def make_for(way: str, **options: Any) -> Accumulator:
    return make(4 if way == "batch" else None, accumulation_steps=3, **options)


def poisoned(name: str) -> Callable[[Any, Batch], Any]:
    """A finite loss whose gradient is not finite in the variables of one layer, if a feature says so."""

    def of(model: Any, batch: Batch) -> Any:
        layer = next(layer for layer in model.layers if layer.name == name)
        is_bad = tf.cast(tf.reduce_any(tf.convert_to_tensor(batch[0]) > 1e6), tf.float64)
        root = tf.sqrt(tf.reduce_sum(layer.bias) * 0)  # its derivative at 0 is 0 * inf
        clean = tf.clip_by_value(batch[0], -10, 10)
        return loss(model, (clean, batch[1])) + tf.cond(is_bad > 0, lambda: root, lambda: tf.zeros([], tf.float64))

    return of


# --- raise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}, {"clip_value": 0.1}])
@pytest.mark.parametrize("way", WAYS)
def test_raise_names_the_step_and_the_variable_and_changes_nothing(
    way: str, clip: dict[str, float], capfd: pytest.CaptureFixture[str]
) -> None:
    accumulator = make_for(way, on_nonfinite="raise", **clip)
    feed(accumulator, way, make_batch())
    before = snapshot(accumulator)
    with pytest.raises(NonFiniteError, match=r"^the gradient of \S*dense\S*/kernel is not finite in step 2, so it was"):
        feed(accumulator, way, bad_batch())
    assert "skipped" not in capfd.readouterr().err
    assert_untouched(accumulator, before)
    assert accumulator.flush() is None
    assert accumulator.num_steps.numpy() == 2
    if not clip:
        assert_exact_step(accumulator)
    with pytest.raises(NonFiniteError, match="in step"):
        feed(accumulator, way, bad_batch())


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}, {"clip_value": 0.1}])
@pytest.mark.parametrize("place", [0, 1])
def test_only_the_first_bad_variable_is_named(place: int, clip: dict[str, float]) -> None:
    model = make_model()
    layer = model.layers[place]
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), poisoned(layer.name), 4, on_nonfinite="raise", **clip)
    assert accumulator.step(make_batch()).is_applied
    x, y = make_batch()
    x[6, 2] = 1e7
    with pytest.raises(NonFiniteError, match=f"the gradient of {layer.bias.path} is not finite in step 2"):
        accumulator.step((x, y))


def test_raise_acts_on_a_nonfinite_loss_with_a_finite_gradient() -> None:
    def endless(model: Any, batch: Batch) -> Any:
        return loss(model, batch) + tf.where(tf.shape(batch[1])[0] == 3, tf.constant(np.inf, tf.float64), 0)

    accumulator = make(4, loss=endless, on_nonfinite="raise")
    before = snapshot(accumulator)
    for batch in (make_batch(), Window(parts(make_batch()))):
        with pytest.raises(NonFiniteError, match=r"^the loss is not finite in step"):
            accumulator.step(batch)
        assert_untouched(accumulator, before)
    assert_exact_step(accumulator)
    skipping = make(4, loss=endless)
    assert skipping.step(make_batch()).is_applied  # the gradient is right


@pytest.mark.parametrize("kind", ["keras", "legacy", "v1"])
def test_raise_with_every_kind_of_optimizer(kind: str) -> None:
    if kind == "legacy":
        tf_keras = pytest.importorskip("tf_keras")
    optimizer = {
        "keras": lambda: keras.optimizers.Adam(0.1),
        "legacy": lambda: tf_keras.optimizers.legacy.SGD(0.1),
        "v1": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1),
    }[kind]()
    accumulator = make(4, optimizer, on_nonfinite="raise")
    before = [v.numpy() for v in accumulator.model.variables]
    with pytest.raises(NonFiniteError, match="in step 1"):
        accumulator.step(bad_batch())
    for now, then in zip(accumulator.model.variables, before, strict=True):
        np.testing.assert_array_equal(now.numpy(), then)
    assert accumulator.step(make_batch()).is_applied


# --- skip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_too_many_skipped_steps_name_the_first_one(way: str) -> None:
    accumulator = make_for(way, max_skipped=3)
    before = snapshot(accumulator)
    feed(accumulator, way, bad_batch())
    feed(accumulator, way, bad_batch())
    assert_untouched(accumulator, before)
    assert feed(accumulator, way, make_batch()).is_applied  # the row ends
    before = snapshot(accumulator)
    for _ in range(2):
        assert not feed(accumulator, way, bad_batch()).is_applied
    with pytest.raises(
        NonFiniteError,
        match=r"^the last 3 steps were skipped, starting at step 4, where the gradient of \S+kernel was",
    ):
        feed(accumulator, way, bad_batch())
    assert_untouched(accumulator, before)
    assert not feed(accumulator, way, bad_batch()).is_applied  # the first of another row
    assert_exact_step(accumulator)


def test_steps_with_weight_zero_do_not_change_the_count() -> None:
    accumulator = make(4, max_skipped=2, weight=lambda batch: tf.reduce_sum(tf.cast(batch[1] < 3, tf.int32)))
    x, y = make_batch()
    nothing = x, np.full_like(y, 3)
    accumulator.step(bad_batch())
    for _ in range(3):
        assert accumulator.step(nothing).weight == 0
    with pytest.raises(NonFiniteError, match=r"^the last 2 steps were skipped, starting at step 1,"):
        accumulator.step(bad_batch())


def test_max_skipped_none_never_raises() -> None:
    accumulator = make(4, max_skipped=None)
    for _ in range(40):
        assert not accumulator.step(bad_batch()).is_applied
    assert_exact_step(accumulator)


def test_by_default_32_are_too_many() -> None:
    accumulator = make(4)
    for _ in range(31):
        accumulator.step(bad_batch())
    with pytest.raises(NonFiniteError, match=r"^the last 32 steps were skipped"):
        accumulator.step(bad_batch())


def test_the_count_is_saved(tmp_path: Any) -> None:
    accumulator = make(4, max_skipped=2)
    accumulator.step(bad_batch())
    path = tf.train.Checkpoint(accumulator=accumulator).save(str(tmp_path / "state"))
    other = make(4, max_skipped=2)
    tf.train.Checkpoint(accumulator=other).restore(path).assert_existing_objects_matched()
    with pytest.raises(NonFiniteError, match=r"^the last 2 steps were skipped, starting at step 1,"):
        other.step(bad_batch())


def test_looking_at_the_outcome_reads_nothing_else() -> None:
    """The values of the step stay on the device until somebody reads them."""
    step = make(4, on_nonfinite="raise").step(make_batch())
    assert all(callable(value) for value in (step._terms, step._weight, step._grad_norm, step._is_applied))


# --- stop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_stop_skips_and_refuses_further_steps(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    accumulator = make_for(way, on_nonfinite="stop")
    assert feed(accumulator, way, make_batch()).is_applied
    assert not accumulator.is_stopped
    before = snapshot(accumulator)
    assert not feed(accumulator, way, bad_batch()).is_applied
    assert accumulator.is_stopped
    assert "a step was skipped" in capfd.readouterr().err
    with pytest.raises(OrderError, match=r"training was stopped .* set accumulator\.is_stopped = False"):
        feed(accumulator, way, make_batch())
    assert accumulator.flush() is None
    assert_untouched(accumulator, before)
    accumulator.is_stopped = False
    assert_exact_step(accumulator)


def test_stop_ends_the_run_and_gives_its_history() -> None:
    model = make_model()
    data = [*parts(make_batch()), *parts(bad_batch()), *parts(make_batch())]
    history = train_with_accumulation(
        model, data, keras.optimizers.SGD(0.1), loss, accumulation_steps=3, epochs=2, on_nonfinite="stop"
    )
    assert [step.is_applied for step in history.steps] == [True, False]
    assert len(history.losses) == 1
    accumulator = make()
    accumulator.step(make_batch())
    for a, b in zip(model.variables, accumulator.model.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12, atol=1e-12)


# --- loss scaling, graphs, replicas, options -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["raise", "stop"])
def test_overflow_of_a_scaled_loss_is_only_counted(policy: Any) -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0)
    accumulator = make(4, optimizer, on_nonfinite=policy, max_skipped=3)
    for _ in range(2):
        assert not accumulator.step(bad_batch()).is_applied
    assert accumulator.step(make_batch()).is_applied
    for _ in range(2):
        assert not accumulator.step(bad_batch()).is_applied
    assert not accumulator.is_stopped
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"^the last 3 steps were skipped, starting at step 4,"):
            accumulator.step(bad_batch())
    else:
        accumulator.step(bad_batch())
    assert accumulator.is_stopped == (policy == "stop")
    assert optimizer.dynamic_scale.numpy() == 8.0 / 2**5


def in_a_graph(accumulator: Accumulator) -> Callable[[Any, Any], None]:
    signature = [tf.TensorSpec([None, 5], tf.float64), tf.TensorSpec([None], tf.int64)]
    return tf.function(lambda x, y: add(accumulator, (x, y), tf.shape(y)[0]), input_signature=signature)


@pytest.mark.compiled
@pytest.mark.parametrize("policy", ["raise", "stop"])
def test_own_graph_can_only_skip(policy: Any) -> None:
    accumulator = make(None, accumulation_steps=3, on_nonfinite=policy)
    before = snapshot(accumulator)
    with pytest.raises(OptionError, match=f'on_nonfinite="{policy}" works in eager code only'):
        in_a_graph(accumulator)(*make_batch())
    with pytest.raises(OptionError, match="eager code only"):
        tf.function(accumulator.flush)()
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


@pytest.mark.compiled
def test_too_many_skipped_steps_end_an_own_graph_too() -> None:
    accumulator = make(None, accumulation_steps=1, max_skipped=3)
    feed = in_a_graph(accumulator)
    before = snapshot(accumulator)
    for _ in range(2):
        feed(*bad_batch())
    feed(*bad_batch())
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="too many steps in a row"):
            feed(*make_batch())
    assert accumulator.num_steps.numpy() == 3
    assert accumulator.flush() is None
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)  # which ends the row
    feed(*make_batch())
    assert accumulator.last_step.is_applied


@pytest.mark.parametrize("way", ["batch", "add"])
def test_on_several_replicas(way: str) -> None:
    strategy = mirrored()
    with strategy.scope():
        accumulator = make_for(way, on_nonfinite="raise")

    def on_replica(x: Any, y: Any) -> None:
        value, found = gradients(accumulator.model, (x, y))
        accumulator.add(found, weight=len(y), loss=value)

    def feed(batch: Batch) -> None:
        if way == "batch":
            accumulator.step(batch)
            return
        for x, y in parts(batch):
            strategy.run(on_replica, args=(tf.constant(x), tf.constant(y)))

    feed(make_batch())
    before = snapshot(accumulator)
    with pytest.raises(NonFiniteError, match=r"the gradient of \S+kernel is not finite in step 2"):
        feed(bad_batch())
    assert_untouched(accumulator, before)
    feed(make_batch())
    assert accumulator.optimizer.iterations.numpy() == 2
    assert accumulator.num_steps.numpy() == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' is unknown"),
        ({"max_skipped": 0}, "max_skipped is 0"),
        ({"max_skipped": 2.5}, "max_skipped is 2.5"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)
