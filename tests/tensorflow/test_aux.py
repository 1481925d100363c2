"""Aux of a loss arrives in the step as if the batch had run whole: means by weight, sums, rows in order."""

import warnings
from collections import OrderedDict
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import LossError, OptionError, Step, Window
from bigbatch.tensorflow import Accumulator, train_with_accumulation
from tests.problems import IGNORED, samples, tokens

from .test_distribute import on_replicas
from .training import Language, cut, mirrored

pytestmark = pytest.mark.usefixtures("float64")
Batch = dict[str, Any]


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(10)])


def make_batch(size: int = 13) -> Batch:
    (batch,) = samples(size)
    return batch


def loss(model: Any, batch: Batch) -> Any:
    logits = model(batch["x"])
    is_hit = tf.equal(tf.argmax(logits, 1), batch["y"])
    aux = {
        "accuracy": tf.reduce_mean(tf.cast(is_hit, tf.float64)),
        "correct": tf.math.count_nonzero(is_hit),
        "rows": {"logits": logits, "hits": is_hit},
        "others": (tf.reduce_mean(logits), None),
    }
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits)), aux


def make(size: int | None = 4, loss: Any = loss, **options: Any) -> Accumulator:
    return Accumulator(make_model(), keras.optimizers.SGD(0.1), loss, size, **{"has_aux": True, **options})


def assert_aux_of_full_batch(step: Step, batch: Batch) -> None:
    _, full = loss(make_model(), batch)
    assert step.summed == ("correct",)
    expected = {"accuracy": full["accuracy"], "correct": full["correct"], "others.0": full["others"][0]}
    assert step.metrics == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-12)
    assert step.aux["accuracy"] == step.metrics["accuracy"]
    assert step.aux["correct"] == int(full["correct"])
    assert step.aux["others"][1] is None
    np.testing.assert_allclose(step.aux["rows"]["logits"], full["rows"]["logits"], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(step.aux["rows"]["hits"], full["rows"]["hits"])


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("size", [1, 2, 3, 12, 13])
def test_aux_is_that_of_the_full_batch(size: int) -> None:
    assert_aux_of_full_batch(make(size).step(make_batch()), make_batch())


@pytest.mark.parametrize("is_jit", [False, True])
def test_in_a_graph_for_batches_of_any_size(is_jit: bool) -> None:
    accumulator = make(jit_compile=is_jit)
    start = accumulator.model.get_weights()
    for size in (13, 8, 3):
        accumulator.model.set_weights(start)
        assert_aux_of_full_batch(accumulator.step(make_batch(size)), make_batch(size))
    assert accumulator.num_traces == 1


def test_of_a_window() -> None:
    batch = make_batch()
    assert_aux_of_full_batch(make(None).step(Window(cut(batch, 4))), batch)


@pytest.mark.parametrize("split", [(9, 4), (11, 2), (5, 0)])
def test_on_replicas_scalars_are_of_all_and_rows_in_order(split: tuple[int, int]) -> None:
    global _on_replicas
    batch = make_batch(sum(split))
    with mirrored().scope():
        _on_replicas = _on_replicas or (make(), make(None))
    for accumulator in _on_replicas:
        accumulator.model.set_weights(make_model().get_weights())
    by_batch, by_window = _on_replicas
    assert_aux_of_full_batch(by_batch.step(on_replicas(batch, split)), batch)
    assert_aux_of_full_batch(by_window.step(Window(cut(batch, 4))), batch)


_on_replicas: tuple[Accumulator, Accumulator] | None = None


@pytest.mark.parametrize("is_eager", [True, False])
def test_scalars_are_weighted_like_the_loss_and_rows_without_weight_are_kept(is_eager: bool) -> None:
    tf.config.run_functions_eagerly(is_eager)
    batch = tokens(3, 60, 0, 40, 21)

    def of_tokens(model: Any, batch: Batch) -> Any:
        logits, length = model(batch["x"])
        kept = tf.cast(batch["y"] != IGNORED, logits.dtype)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(batch["y"], 0), logits) * kept
        value = tf.reduce_sum(losses) / tf.reduce_sum(kept)
        return value, {"perplexity": value, "tokens": tf.reduce_sum(tf.cast(kept, tf.int32)), "length": length}

    def make() -> Any:
        keras.utils.set_random_seed(0)
        model = Language()
        model(np.zeros((1, 1), np.int64))
        return model

    def num_tokens(batch: Batch) -> Any:
        return tf.math.count_nonzero(batch["y"] != IGNORED)

    value, full = of_tokens(make(), batch)
    options: Any = {"weight": num_tokens, "has_aux": True}
    try:
        step = Accumulator(make(), keras.optimizers.SGD(0.1), of_tokens, 1, **options).step(batch)
    finally:
        tf.config.run_functions_eagerly(False)
    assert step.loss == pytest.approx(float(value), rel=1e-12)
    assert step.metrics == pytest.approx({"perplexity": float(value), "tokens": 124}, rel=1e-12)
    np.testing.assert_allclose(step.aux["length"], full["length"], rtol=1e-12)
    naive = np.mean([float(of_tokens(make(), row)[0]) for row in cut(batch, 1) if np.any(row["y"] != IGNORED)])
    assert abs(naive - float(value)) > 1e-3  # a mean of means is something else


@pytest.mark.usefixtures("eagerly")
def test_ways_to_combine() -> None:
    def of_all(model: Any, batch: Batch) -> Any:
        value, aux = loss(model, batch)
        size = tf.cast(tf.shape(batch["y"])[0], tf.float64)
        counts = tf.reduce_sum(tf.one_hot(batch["y"], 10, dtype=tf.int32), 0)
        return value, {"sum": size, "mean": counts, "counts": counts, "parts": aux["others"][0][None], "most": size}

    def most(values: Any, weights: list[float]) -> float:
        assert weights == [4, 4, 4, 1]
        return float(max(values))

    aux = {"sum": "sum", "mean": "mean", "counts": "sum", "parts": "concatenate", "most": most}
    step = make(loss=of_all, aux=aux).step(make_batch())
    counts = np.bincount(make_batch()["y"], minlength=10)
    assert step.metrics == {"sum": 13, "most": 4}
    assert step.summed == ("sum",)
    np.testing.assert_array_equal(step.aux["counts"], counts)
    assert len(step.aux["parts"]) == 4
    by_part = [np.bincount(part["y"], minlength=10) * len(part["y"]) for part in cut(make_batch(), 4)]
    np.testing.assert_allclose(step.aux["mean"], np.sum(by_part, 0) / 13, rtol=1e-12)


class Output(OrderedDict):
    """As Hugging Face's: a mapping with attributes."""

    __getattr__ = OrderedDict.__getitem__


@pytest.mark.usefixtures("eagerly")
def test_a_mapping_has_the_loss_in_it() -> None:
    def of_output(model: Any, batch: Batch) -> Any:
        value, aux = loss(model, batch)
        return Output(loss=value, logits=aux["rows"]["logits"])

    step = make(loss=of_output).step(make_batch())
    assert step.aux["logits"].shape == (13, 10)
    plain = make(loss=of_output, has_aux=False).step(make_batch())
    assert plain.aux is None
    assert plain.metrics == {}
    assert plain.loss == step.loss == pytest.approx(float(loss(make_model(), make_batch())[0]), rel=1e-12)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize(
    ("returns", "options", "error", "message"),
    [
        (lambda value, aux: (value, aux["rows"]["logits"]), {"has_aux": False}, LossError, "pass has_aux=True"),
        (lambda value, aux: value, {}, LossError, "must return the pair"),
        (lambda value, aux: (value, aux["rows"]["hits"][0]), {}, OptionError, "true or false"),
        (lambda value, aux: (value, tf.zeros(7)), {}, OptionError, "shape"),
        (lambda value, aux: (value, "text"), {}, OptionError, "str"),
        (lambda value, aux: (value, aux["accuracy"]), {"aux": "concatenate"}, OptionError, "no row"),
        (lambda value, aux: (value, {"a": value}), {"aux": {"b": "sum"}}, OptionError, "'a'"),
        (lambda value, aux: {"logits": value}, {}, LossError, '"loss"'),
    ],
)
def test_refusals(returns: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(loss=lambda model, batch: returns(*loss(model, batch)), **options).step(make_batch())


def test_other_rows_are_found_when_the_graph_runs() -> None:
    def of_pairs(model: Any, batch: Batch) -> Any:
        value, aux = loss(model, batch)
        return value, tf.concat([aux["rows"]["logits"]] * 2, 0)

    with pytest.raises(OptionError, match="is not that of the samples"):
        make(loss=of_pairs).step(make_batch())


@pytest.mark.usefixtures("eagerly")
def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(OptionError, match="aux='average' is unknown"):
        make(aux="average")


@pytest.mark.usefixtures("eagerly")
def test_a_history_keeps_metrics() -> None:
    def fast(model: Any, batch: Batch) -> Any:
        value, aux = loss(model, batch)
        return value, {"accuracy": aux["accuracy"], "correct": aux["correct"]}

    history = train_with_accumulation(
        make_model(), [make_batch(9), make_batch(5)], keras.optimizers.SGD(0.0), fast, 2, epochs=2, has_aux=True
    )
    hits = [np.asarray(loss(make_model(), make_batch(size))[1]["rows"]["hits"]).sum() for size in (9, 5)]
    assert history.metrics == {"accuracy": pytest.approx([sum(hits) / 14] * 2), "correct": [sum(hits)] * 2}
    assert history.steps[0].aux is None


@pytest.mark.usefixtures("eagerly")
def test_verify_leaves_aux_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make().verify(make_batch()).is_exact
