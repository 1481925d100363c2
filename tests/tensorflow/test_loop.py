"""XLA compiles the whole loop over micro-batches, unless that is slower or impossible."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tensorflow import Accumulator
from bigbatch.tensorflow.loop import _is_good_for_xla as is_good_for_xla


def dense() -> Any:
    return keras.Sequential([keras.Input((36,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])


def convolutional() -> Any:
    layers = [keras.layers.Reshape((6, 6, 1)), keras.layers.Conv2D(2, 3), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((36,)), *layers, keras.layers.Dense(3)])


def normalised() -> Any:
    return keras.Sequential([keras.Input((36,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])


def loss(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.square(model(batch, training=True) - 1))


def trained(make: Any, sizes: tuple[int, ...], **options: Any) -> tuple[Accumulator, list[Any]]:
    keras.utils.set_random_seed(0)
    model = make()
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), loss, 4, **options)
    draw = np.random.default_rng(0)
    for size in sizes:
        accumulator.step(draw.normal(size=(size, 36)).astype("float32"))
    return accumulator, model.get_weights()


def places_of_loops(accumulator: Accumulator) -> set[str]:
    """Returns whether loops are inside functions that XLA compiles, or around them."""
    (graph,) = [traced.call.graph.as_graph_def() for traced, _ in accumulator._graphs.made.values()]
    compiled = {f.signature.name for f in graph.library.function if f.attr["_XlaMustCompile"].b}
    found = {"around" for node in graph.node if "While" in node.op}
    for function in graph.library.function:
        if any("While" in node.op for node in function.node_def):
            found.add("inside" if function.signature.name in compiled else "elsewhere")
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("make", [dense, convolutional, normalised])
@pytest.mark.parametrize("sizes", [(12,), (13, 12, 3, 1, 4)], ids=["even", "ragged"])
@pytest.mark.filterwarnings("ignore:.*BatchNormalization:bigbatch.BigBatchWarning")
def test_compiled_and_plain_loops_agree(make: Any, sizes: tuple[int, ...]) -> None:
    accumulator, found = trained(make, sizes, jit_compile=True)
    _, plain = trained(make, sizes)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert accumulator.num_traces == 1


def test_empty_micro_batches_are_not_compiled() -> None:
    """XLA compiles both sides of a condition and refuses a loss that takes the maximum of an empty tensor."""

    def best(model: Any, batch: Any) -> Any:
        return tf.reduce_mean(tf.nn.top_k(tf.transpose(model(batch)), 1).values)

    accumulator = Accumulator(dense(), keras.optimizers.SGD(0.1), best, 4, jit_compile=True)
    for size in (12, 3, 13):
        assert accumulator.step(np.ones((size, 36), "float32")).is_applied


def test_the_whole_loop_is_compiled() -> None:
    assert places_of_loops(trained(dense, (12,), jit_compile=True)[0]) == {"inside"}
    assert places_of_loops(trained(dense, (12,))[0]) == {"around"}


def test_a_loop_of_convolutions_is_not_compiled_on_a_cpu() -> None:
    is_on_cpu = not tf.config.list_logical_devices("GPU")
    loops = places_of_loops(trained(convolutional, (12,), jit_compile=True)[0])
    assert loops == ({"around"} if is_on_cpu else {"inside"})


def test_convolutions_inside_functions_are_found() -> None:
    inner = tf.function(lambda x: tf.nn.conv2d(x, tf.ones((2, 2, 1, 1)), 1, "SAME"), autograph=False)
    outer = tf.function(lambda x: inner(x) + 1, autograph=False)
    graph = outer.get_concrete_function(tf.TensorSpec((None, 4, 4, 1))).graph
    assert is_good_for_xla(graph) == bool(tf.config.list_logical_devices("GPU"))
    assert is_good_for_xla(tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec((None, 4))).graph)


def test_variable_without_a_gradient_does_not_change() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((36,)), keras.layers.Dense(5), keras.layers.Dense(3)])
    before = model.get_weights()
    first = model.layers[0]
    accumulator = Accumulator(
        model, keras.optimizers.SGD(0.1), lambda _, x: tf.reduce_mean(tf.square(tf.matmul(x, first.kernel))), 4
    )
    accumulator.step(np.ones((10, 36), "float32"))
    is_changed = [not np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True)]
    assert is_changed == [True, False, False, False]
