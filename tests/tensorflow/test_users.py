"""Two calls at once: the second is refused and the first is exact; a window of two models is never applied."""

import gc
import threading
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import OrderError, Window
from bigbatch.tensorflow import Accumulator
from bigbatch.tensorflow.sums import SumVariables
from tests.tensorflow.test_accumulator import (
    add,
    assert_exact_step,
    assert_same,
    assert_untouched,
    full_batch_step,
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
BUSY = r"was called while another thread is in a step of the same parameters: let one thread train them"
CHANGED = r"changed by another step in the middle of a window of 1 micro-batches, .* was dropped: flush\(\) before"


class Slow:
    """A loss that signals its start and waits for a signal to continue."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, model: Any, batch: Any) -> Any:
        def wait(x: Any) -> Any:
            self.has_begun.set()
            assert self.may_go_on.wait(30)
            return x

        held = tf.numpy_function(wait, [batch[0]], tf.float64)
        return loss(model, (tf.ensure_shape(held, batch[0].shape), batch[1]))


@pytest.mark.parametrize("second", ["step", "window", "add", "flush", "another accumulator"])
def test_a_second_thread_is_refused_at_once_and_the_first_is_exact(second: str) -> None:
    slow = Slow()
    accumulator = make(4, loss=slow, accumulation_steps=3)
    made: list[Any] = []
    first = threading.Thread(target=lambda: made.append(accumulator.step(make_batch())))
    first.start()
    assert slow.has_begun.wait(30)
    other = Accumulator(accumulator.model, keras.optimizers.SGD(5.0), loss, 4)
    calls = {
        "step": lambda: accumulator.step(make_batch()),
        "window": lambda: accumulator.step(Window(parts(make_batch()))),
        "add": lambda: accumulator.add([tf.zeros(v.shape, tf.float64) for v in accumulator.model.variables], weight=9),
        "flush": accumulator.flush,
        "another accumulator": lambda: other.step(make_batch()),
    }
    try:
        with pytest.raises(OrderError, match=BUSY):
            calls[second]()
    finally:
        slow.may_go_on.set()
        first.join(30)
    assert made[0].is_applied
    assert_same(accumulator.model, full_batch_step(make_model(), keras.optimizers.SGD(0.1)))
    assert accumulator.flush() is None
    assert_exact_step(accumulator)


def test_two_models_with_one_optimizer_take_turns() -> None:
    slow, first, second = Slow(), make_model(), make_model()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([*first.trainable_variables, *second.trainable_variables])
    accumulators = Accumulator(first, optimizer, slow, 4), Accumulator(second, optimizer, loss, 4)
    thread = threading.Thread(target=lambda: accumulators[0].step(make_batch()))
    thread.start()
    assert slow.has_begun.wait(30)
    with pytest.raises(OrderError, match=BUSY):
        accumulators[1].step(make_batch())
    slow.may_go_on.set()
    thread.join()
    accumulators[1].step(make_batch())
    assert optimizer.iterations.numpy() == 2
    for model in (first, second):
        assert_same(model, full_batch_step(make_model(), keras.optimizers.SGD(0.1)))


def test_models_that_share_nothing_train_at_the_same_time() -> None:
    slow = Slow()
    accumulator, other = make(4, loss=slow), make(4)
    first = threading.Thread(target=lambda: accumulator.step(make_batch()))
    first.start()
    assert slow.has_begun.wait(30)
    assert other.step(make_batch()).is_applied
    slow.may_go_on.set()
    first.join(30)
    assert_same(accumulator.model, other.model)


def test_error_releases_the_lock() -> None:
    accumulator = make(4, loss=lambda model, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accumulator.step(make_batch())
    assert_exact_step(accumulator)


@pytest.mark.compiled
@pytest.mark.each_value
@pytest.mark.parametrize("next_call", ["add", "flush"])
@pytest.mark.parametrize("changed_by", ["step", "window", "add", "the optimizer", "fit"])
def test_window_is_dropped_if_another_changed_its_variables(changed_by: str, next_call: str) -> None:
    accumulator = make(None, accumulation_steps=3)
    model, optimizer = accumulator.model, accumulator.optimizer
    other = Accumulator(model, keras.optimizers.SGD(0.5), loss, 4, accumulation_steps=1)
    add(accumulator, parts(make_batch())[0])
    if changed_by == "step":
        other.step(make_batch())
    elif changed_by == "window":
        other.step(Window(parts(make_batch())))
    elif changed_by == "add":
        add(other, make_batch())
    elif changed_by == "the optimizer":
        full_batch_step(model, optimizer)
    else:
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(*make_batch(), verbose=0)
    before = snapshot(accumulator)
    with pytest.raises(OrderError, match=CHANGED):
        add(accumulator, parts(make_batch())[1]) if next_call == "add" else accumulator.flush()
    assert_untouched(accumulator, before)
    assert accumulator.flush() is None
    assert_exact_step(accumulator)


@pytest.mark.parametrize("next_call", ["add", "flush", "step"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_partly_added_micro_batch_is_never_applied(
    num_before: int, next_call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = make(4, accumulation_steps=3)
    pieces = parts(make_batch())
    for piece in pieces[:num_before]:
        add(accumulator, piece)
    before = snapshot(accumulator)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SumVariables, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            add(accumulator, pieces[num_before])
    if num_before:
        with pytest.raises(OrderError, match=r"had 1 micro-batches, .* dropped: feed its micro-batches again"):
            add(accumulator, pieces[0]) if next_call == "add" else accumulator.flush()
    elif next_call == "flush":
        assert accumulator.flush() is None
    assert_untouched(accumulator, before)
    if next_call == "step":
        accumulator.step(Window(pieces))
    else:
        for piece in pieces:
            add(accumulator, piece)
    assert_same(accumulator.model, full_batch_step(make_model(), keras.optimizers.SGD(0.1)))


def test_skipped_step_changes_nothing() -> None:
    accumulator = make(None, accumulation_steps=3)
    other = Accumulator(accumulator.model, keras.optimizers.SGD(0.5), loss, 4, weight=lambda _: tf.zeros([]))
    pieces = parts(make_batch())
    add(accumulator, pieces[0])
    other.step((make_batch()[0] * np.nan, make_batch()[1]))
    other.step(make_batch())
    for piece in pieces[1:]:
        add(accumulator, piece)
    assert_same(accumulator.model, full_batch_step(make_model(), keras.optimizers.SGD(0.1)))


def test_two_accumulators_that_take_turns_are_exact() -> None:
    model, optimizer = make_model(), keras.optimizers.SGD(0.1)
    ours, theirs = (Accumulator(model, optimizer, loss, 4, accumulation_steps=3) for _ in range(2))
    full, full_optimizer = make_model(), keras.optimizers.SGD(0.1)
    for accumulator in (ours, theirs, ours, theirs):
        for piece in parts(make_batch()):
            add(accumulator, piece)
        accumulator.step(make_batch())
        for _ in range(2):
            full_batch_step(full, full_optimizer)
    assert_same(model, full)


def test_restored_window_continues_in_this_process(tmp_path: Any) -> None:
    accumulator = make(None, accumulation_steps=3)
    checkpoint = tf.train.Checkpoint(accumulator=accumulator, model=accumulator.model, optimizer=accumulator.optimizer)
    pieces = parts(make_batch())
    add(accumulator, pieces[0])
    path = checkpoint.write(str(tmp_path / "state"))
    for piece in (*pieces[1:], pieces[0]):  # a step, and the first micro-batch of the next window
        add(accumulator, piece)
    checkpoint.read(path).assert_consumed()
    for piece in pieces[1:]:
        add(accumulator, piece)
    assert_same(accumulator.model, full_batch_step(make_model(), keras.optimizers.SGD(0.1)))


def test_on_several_replicas() -> None:
    strategy = mirrored()
    with strategy.scope():
        accumulator = make(None, accumulation_steps=2)
        other = Accumulator(accumulator.model, keras.optimizers.SGD(0.5), loss, 4)

    def on_replica() -> None:
        value, found = gradients(accumulator.model, make_batch())
        accumulator.add(found, weight=11, loss=value)

    strategy.run(on_replica)
    other.step(make_batch())
    with pytest.raises(OrderError, match=CHANGED):
        strategy.run(on_replica)
    assert accumulator.flush() is None
    for _ in range(2):
        strategy.run(on_replica)
    assert accumulator.last_step.is_applied


def test_lock_of_a_model_is_freed_with_its_accumulator() -> None:
    exclusive = weakref.ref(make(None)._exclusive)
    gc.collect()
    assert exclusive() is None
