"""accumulate(model, …, loss=function): models with a train_step of their own."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from bigbatch import BigBatchWarning, LossError, OptionError
from bigbatch.keras import accumulate, verify

from .cases import BATCH_SIZE, gap, images, lengths, rows, sgd
from .test_windows import MICRO, WHOLE, Feed, batches

BACKEND = keras.backend.backend()
ROUNDING = 1e-12 if BACKEND == "tensorflow" else 1e-6


class Autoencoder(keras.Model):
    """Its train_step is that of a guide of Keras: it returns its own trackers. It has no loss in compile()."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers.Dense(8, activation="tanh", kernel_regularizer="l2")
        self.decoder = layers.Dense(64)
        self.reconstruction = keras.metrics.Mean(name="reconstruction")

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))

    def compute(self, x: Any) -> tuple[Any, Any]:
        own = ops.mean(ops.square(x - self(x, training=True)))
        self.reconstruction.update_state(own, sample_weight=ops.shape(x)[0])
        return own + 0.1 * ops.mean(ops.abs(self.encoder(x))) + sum(self.losses), own

    def train_step(self, *args: Any) -> Any:
        return {"tensorflow": self.on_tensorflow, "torch": self.on_torch, "jax": self.on_jax}[BACKEND](*args)

    def on_tensorflow(self, data: Any) -> Any:
        import tensorflow as tf

        x = data[0]
        with tf.GradientTape() as tape:
            total, _ = self.compute(x)
        self.optimizer.apply_gradients(
            zip(tape.gradient(total, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self._loss_tracker.update_state(total, sample_weight=tf.shape(x)[0])
        return {metric.name: metric.result() for metric in self.metrics}

    def on_torch(self, data: Any) -> Any:
        import torch

        x = data[0]
        self.zero_grad()
        total, _ = self.compute(x)
        total.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        self._loss_tracker.update_state(total.detach(), sample_weight=len(x))
        return {metric.name: metric.result() for metric in self.metrics}

    def on_jax(self, state: Any, data: Any) -> Any:
        import jax

        x = data[0]
        trainable, non_trainable, optimizer, metrics = state

        def gradient_of(trainable: Any) -> Any:
            values = [
                *zip(self.trainable_variables, trainable, strict=True),
                *zip(self.metrics_variables, metrics, strict=True),
            ]
            with keras.StatelessScope(values, collect_losses=True) as scope:
                total, _ = self.compute(x)
                self._loss_tracker.update_state(total, sample_weight=len(x))
                logs = {metric.name: metric.result() for metric in self.metrics}
            return total, (logs, [scope.get_current_value(v) for v in self.metrics_variables])

        gradients, (logs, metrics) = jax.grad(gradient_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return logs, (trainable, non_trainable, optimizer, metrics)


def its_loss(model: Any, x: Any, y: Any, sample_weight: Any) -> Any:
    return model.compute(x)[0]


WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "cut": ({"micro_batch_size": 4}, WHOLE),
    "windows": ({"accumulation_steps": 4}, MICRO),
}


def fit(how: str | None, **options: Any) -> tuple[Any, dict[str, list[float]]]:
    keras.utils.set_random_seed(7)
    model = Autoencoder()
    model(np.zeros((1, 64)))
    way, sizes = WAYS[how] if how else ({}, WHOLE)
    if how:
        accumulate(model, **way, loss=its_loss)
    model.compile(sgd(), **options)
    return model, model.fit(Feed(batches(images()(), sizes)), epochs=2, verbose=0, shuffle=False).history


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.usefixtures("float64")
def test_exact_against_their_own_step(how: str) -> None:
    """The weights, and the history with the metric that the loss function updates."""
    ours, plain = fit(how), fit(None)
    assert plain[1].keys() == {"loss", "reconstruction"}
    # gradients are exact; the regularizer makes a total that Keras 3.15 rounds on some backends
    assert gap(ours, plain) < ROUNDING


@pytest.mark.any_backend
@pytest.mark.compiled
@pytest.mark.each_value
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("options", [{}, *([] if BACKEND == "torch" else [{"jit_compile": True}])], ids=str)
def test_compiled(how: str, options: dict[str, Any]) -> None:
    assert gap(fit(how, **options), fit(None)) < 1e-5


# --- weights ---------------------------------------------------------------------------------------------


def of_rows(model: Any, x: Any, y: Any, sample_weight: Any) -> Any:
    """A mean over the rows that sample_weight counts."""
    values = ops.mean(ops.square(model(x, training=True)), axis=-1) * ops.cast(sample_weight, x.dtype)
    return ops.sum(values) / ops.maximum(ops.sum(ops.cast(sample_weight, x.dtype)), 1)


def num_rows(x: Any, y: Any, sample_weight: Any) -> Any:
    return ops.sum(sample_weight)


def fit_rows(how: str | None, weight: Any) -> tuple[Any, dict[str, list[float]]]:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([layers.Input((9, 16)), layers.Dense(5)])
    way, sizes = WAYS[how] if how else ({"accumulation_steps": 1}, WHOLE)
    accumulate(model, **way, loss=of_rows, weight=weight)
    model.compile(sgd())
    data = rows()
    data["sample_weight"] = (np.arange(9)[None] < lengths()[:, None]).astype(keras.config.floatx())
    return model, model.fit(Feed(batches(data, sizes)), epochs=2, verbose=0, shuffle=False).history


@pytest.mark.parametrize("how", ["cut", pytest.param("windows", marks=pytest.mark.any_backend)])
@pytest.mark.usefixtures("float64")
def test_weight(how: str) -> None:
    """A mean over rows, and the negative control: without weight= it is taken for one over samples."""
    plain = fit_rows(None, num_rows)
    assert gap((fit_rows(how, num_rows)[0], {}), (plain[0], {})) < ROUNDING
    with pytest.warns(BigBatchWarning, match="the loss function is neither a mean nor a sum"):
        naive = fit_rows(how, None)
    assert gap((naive[0], {}), (plain[0], {})) > 1e-3


@pytest.mark.any_backend
@pytest.mark.usefixtures("float64")
def test_a_sum_is_recognised() -> None:
    def loss(model: Any, x: Any, y: Any, sample_weight: Any) -> Any:
        return ops.sum(ops.square(model(x, training=True))) * 0.001

    fits = []
    for size in (16, BATCH_SIZE):
        keras.utils.set_random_seed(7)
        model = accumulate(keras.Sequential([layers.Input((64,)), layers.Dense(5)]), size, loss=loss)
        model.compile(sgd())
        data = images()()
        fits.append((model, model.fit(**data, batch_size=BATCH_SIZE, verbose=0, shuffle=False).history))
    assert gap(*fits) < ROUNDING


# --- verify, and what is refused ---------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_verify_against_their_own_step() -> None:
    model, _ = fit("cut")
    x = images()()["x"][:14]
    assert verify(model, x, micro_batch_size=4)
    accumulate(model, 4, loss=lambda *args: 1.01 * its_loss(*args))
    found = verify(model, x, micro_batch_size=4)
    assert not found
    assert found.total_error == pytest.approx(0.01, rel=0.01)


@pytest.fixture
def plain() -> Any:
    return keras.Sequential([layers.Input((64,)), layers.Dense(5)])


def test_refused(plain: Any) -> None:
    with pytest.raises(OptionError, match=r"Autoencoder has a train_step of its own.* loss=function"):
        accumulate(Autoencoder(), 8)
    with pytest.raises(OptionError, match="a loss of Keras belongs into"):
        accumulate(plain, 8, loss=keras.losses.MeanSquaredError())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="there is no loss="):
        accumulate(plain, 8, weight=num_rows)
    with pytest.raises(OptionError, match="neither micro_batch_size nor accumulation_steps"):
        accumulate(plain, loss=its_loss)
    accumulate(plain, 8, loss=lambda model, x, y, sample_weight: model(x)[:, 0]).compile("sgd")
    with pytest.raises(LossError, match="return one number"):
        plain.fit(**images()(), verbose=0)
