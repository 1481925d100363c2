"""verify: exact where it is, with the reason where it is not, and nothing moved."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from bigbatch import OptionError
from bigbatch.keras import accumulate, verify
from bigbatch.keras.backends.step import FitStep

from .cases import CASES, Case
from .test_infer_reduction import CLASS, TARGET, WEIGHT, Variational, X, mlp, noisy, root

BACKEND = keras.backend.backend()


def compiled(build: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = build()
    model.compile(**{"optimizer": "adam", "loss": "mse", **options})
    return model


NAMES = (
    "digits",
    "regularizers",
    "a subclass that adds a loss",
    "sample_weight, divided by it",
    "masked rows, weighted",
)


@pytest.mark.any_backend
@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=repr)
@pytest.mark.usefixtures("float64")
def test_exact(case: Case) -> None:
    data = {name: array[:13] for name, array in case.data().items()}
    found = verify(compiled(case.build, **case.compile()), **data, micro_batch_size=5)
    assert found, str(found)
    assert found.tolerance == (1e-9 if BACKEND == "tensorflow" else 1e-6)
    assert found.causes == ()


@pytest.mark.compiled
def test_in_float32() -> None:
    found = verify(compiled(mlp), X, TARGET, WEIGHT, micro_batch_size=5)
    assert found, str(found)
    assert found.tolerance == 1e-4
    assert "compared in float32" in found.causes[0]


@pytest.mark.usefixtures("float64")
def test_why_not() -> None:
    found = verify(compiled(mlp, loss=root), X, TARGET, micro_batch_size=5)
    assert not found
    assert found.total_error > 1e-2
    assert any("the loss root is neither a mean nor a sum" in cause for cause in found.causes)


@pytest.mark.usefixtures("float64")
def test_layers_that_see_the_micro_batch_and_dropout() -> None:
    found = verify(compiled(noisy), X, TARGET, micro_batch_size=5)
    assert not found
    assert "dropout" in found.causes[0]
    assert "BatchNormalization" in found.causes[1]
    without = keras.Sequential([layers.Input((6,)), layers.Dropout(0.5), layers.Dense(4)])
    found = verify(compiled(lambda: without), X, TARGET, micro_batch_size=5)
    assert found, str(found)
    assert without.layers[0].rate == 0.5


@pytest.mark.any_backend
@pytest.mark.usefixtures("float64")
def test_randomness_is_named() -> None:
    found = verify(compiled(Variational), X, TARGET, micro_batch_size=5)
    assert not found
    assert any("the full batch differs from itself" in cause for cause in found.causes)


@pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")
@pytest.mark.parametrize("size", [None, 3])
def test_nothing_moves(size: int | None) -> None:
    """Training goes on as if verify had not been called, with the accumulate that there was."""

    def trained(is_verified: bool) -> list[Any]:
        model = compiled(noisy, metrics=["mae"])
        if size is not None:
            accumulate(model, size)
        model.train_on_batch(X, TARGET)
        if is_verified:
            optimizer = model.optimizer
            verify(model, X, TARGET, micro_batch_size=5)
            assert model.optimizer is optimizer
            assert ("train_step" in vars(model)) == (size is not None)
        model.train_on_batch(X, TARGET)
        return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables]]

    for verified, plain in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(verified, plain)


def test_a_step_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with another weight in the step, it is not exact."""
    from bigbatch.keras import loss

    monkeypatch.setattr(loss, "share_of", lambda share, exponent: share**exponent * 1.01)
    found = verify(compiled(mlp), X, TARGET, micro_batch_size=5)
    assert not found
    assert found.total_error == pytest.approx(0.01, rel=0.01)


@pytest.mark.any_backend
@pytest.mark.usefixtures("float64")
def test_the_short_form() -> None:
    """Cuts the batch into parts of different sizes, or as the model is accumulated."""
    model = compiled(mlp)
    assert verify(model, X, TARGET)
    assert verify(model, X, TARGET, WEIGHT)
    assert verify(accumulate(model, 3), X, TARGET)
    assert verify(accumulate(model, 64), X, TARGET)
    assert verify(model, X[:2], TARGET[:2])
    assert verify(model, X[:3], TARGET[:3])
    assert not verify(compiled(mlp, loss=root), X, TARGET)


@pytest.mark.usefixtures("float64")
def test_accumulation_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """fit gets the batch in micro-batches; the control shows that its step is the one that is verified."""
    from bigbatch.keras import loss

    model = accumulate(compiled(mlp), accumulation_steps=4)
    optimizer = model.optimizer
    assert verify(model, X, TARGET, WEIGHT, micro_batch_size=5)
    assert model.optimizer is optimizer
    assert FitStep.of(model).accumulation_steps == 4
    monkeypatch.setattr(loss, "share_of", lambda share, exponent: share**exponent * 1.01)
    found = verify(model, X, TARGET)
    assert found.total_error == pytest.approx(0.01, rel=0.01)


@pytest.mark.usefixtures("float64")
def test_frozen_batch_normalization() -> None:
    """The full batch is frozen, too, so the gradient is exact."""

    def build() -> Any:
        return keras.Sequential([layers.Input((6,)), layers.BatchNormalization(), layers.Dense(4)])

    model = compiled(build)
    assert not verify(model, X, TARGET)
    assert verify(accumulate(model, 5, batch_norm="frozen"), X, TARGET)
    assert verify(accumulate(model, accumulation_steps=4, batch_norm="frozen"), X, TARGET)


def test_sparse_gradients() -> None:
    def build() -> Any:
        return keras.Sequential([layers.Input((1,), dtype="int32"), layers.Embedding(4, 3), layers.Dense(4)])

    assert verify(compiled(build), CLASS[:, None], TARGET[:, None], micro_batch_size=5)


def test_refused() -> None:
    model = mlp()
    with pytest.raises(OptionError, match="is not compiled"):
        verify(model, X, TARGET, micro_batch_size=5)
    model.compile("sgd", "mse")
    with pytest.raises(OptionError, match="micro_batch_size=17 leaves the batch of 17 in one piece"):
        verify(model, X, TARGET, micro_batch_size=17)
    with pytest.raises(OptionError, match="the batch has one sample"):
        verify(model, X[:1], TARGET[:1], micro_batch_size=1)
    with pytest.raises(OptionError, match=r"x has a .* in it: verify\(\) takes one batch"):
        verify(model, iter([(X, TARGET)]))
    with pytest.raises(OptionError, match="pass a whole number"):
        verify(model, X, TARGET, micro_batch_size=0)
