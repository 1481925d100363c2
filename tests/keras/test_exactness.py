"""fit in micro-batches gives the weights and the history of plain fit."""

import keras
import numpy as np
import pytest

from bigbatch.keras import accumulate

from .cases import BATCH_SIZE, CASES, Case, entropy, gap, images, mlp, sgd

BACKEND = keras.backend.backend()
DIGITS = CASES[0]
IS_FIRST = BACKEND == "tensorflow"  # on the others, some cases that differ only in numbers are left out


def tolerance(case: Case) -> float:
    """The tolerance for rounding: that of float32 if Keras 3.15 itself rounds a float64 loss to float32."""
    if BACKEND == "torch" or (BACKEND == "jax" and case.adds_losses):
        return 1e-6
    return 1e-12


# These differ on JAX: how losses, masks, weights and losses of layers reach the compiled step.
ON_JAX = (
    "digits", "no metrics", "regularizers", "a subclass that adds a loss", "a compute_loss of its own",
    "sample_weight, divided by it", "masked rows, weighted", "text with ignored tokens", "two outputs, one masked",
)  # fmt: skip
EVERY_CASE = [
    case if BACKEND != "jax" or case.name in ON_JAX else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize("case", EVERY_CASE, ids=repr)
@pytest.mark.usefixtures("float64")
def test_exact_in_float64(case: Case) -> None:
    assert gap(case.fit(case.micro_batch_size), case.plain()) < tolerance(case)


THIRTEEN = Case(
    "13 samples", mlp, lambda: {name: array[:26] for name, array in images()().items()}, entropy(), batch_size=13
)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 12, 13, 14] if IS_FIRST else [1, 3, 14])
@pytest.mark.usefixtures("float64")
def test_every_size(micro_batch_size: int) -> None:
    assert gap(THIRTEEN.fit(micro_batch_size), THIRTEEN.plain()) < tolerance(THIRTEEN)


MODES = {
    "tensorflow": [{}, {"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    "jax": [{}, {"run_eagerly": True}, {"steps_per_execution": 2}],
    "torch": [{}],  # compiling needs a C++ compiler, and Keras has no steps_per_execution on torch
}[BACKEND]


@pytest.mark.each_value
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("name", ["digits", "masked rows, weighted"] if IS_FIRST else ["digits"])
def test_exact_in_float32(name: str, options: dict) -> None:
    case = next(case for case in CASES if case.name == name)
    assert gap(case.fit(case.micro_batch_size, **options), case.plain()) < 1e-5


OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "weight decay, global norm": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.1, global_clipnorm=0.1),
    "norm": lambda: sgd(clipnorm=0.05),
    "value": lambda: sgd(clipvalue=0.005),
    "moving average": lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS) if IS_FIRST else ["weight decay, global norm", "moving average"])
@pytest.mark.usefixtures("float64")
def test_everything_of_a_step_happens_once_per_step(name: str) -> None:
    ours = DIGITS.fit(16, optimizer=OPTIMIZERS[name]())
    plain = DIGITS.fit(None, optimizer=OPTIMIZERS[name]())
    assert gap(ours, plain) < 10 * tolerance(DIGITS)
    assert int(ours[0].optimizer.iterations.numpy()) == 9
    for a, b in zip(ours[0].optimizer.variables, plain[0].optimizer.variables, strict=True):
        assert np.allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-7)


def keras_accumulates(case: Case) -> tuple:
    """Keras's own way: an optimizer that accumulates, and a fit on micro-batches."""
    steps = -(-case.batch_size // case.micro_batch_size)
    theirs = Case(case.name, case.build, case.data, case.compile, batch_size=case.micro_batch_size)
    return theirs.fit(None, optimizer=sgd(gradient_accumulation_steps=steps))


@pytest.mark.any_backend
@pytest.mark.parametrize("name", ["digits", "sample_weight, divided by it", "masked rows, no metrics"])
@pytest.mark.usefixtures("float64")
def test_negative_control_keras_accumulation(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert gap(keras_accumulates(case), case.plain()) > 0.01


@pytest.mark.any_backend
@pytest.mark.usefixtures("float64")
def test_keras_accumulation_is_right_for_equal_sizes() -> None:
    case = next(case for case in CASES if case.name == "equal sizes")
    assert gap(keras_accumulates(case), case.plain()) < 1e-6


# --- low precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
def test_low_precision(policy: str) -> None:
    """The result is as close to the full batch as the precision allows."""
    keras.config.set_dtype_policy(policy)
    case = next(case for case in CASES if case.name == "no metrics")
    assert gap(case.fit(16), case.fit(None)) < (5e-3 if policy == "mixed_float16" else 5e-2)


@pytest.mark.parametrize("row", [0, 20, BATCH_SIZE - 1])
def test_overflow_in_any_micro_batch_skips_the_whole_step(row: int) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = accumulate(mlp(), 16)
    model.compile(sgd(), **entropy(None)())
    data = {name: array[:BATCH_SIZE].copy() for name, array in images()().items()}
    model.fit(**data, batch_size=BATCH_SIZE, verbose=0)  # builds the model
    before, scale = model.get_weights(), float(model.optimizer.dynamic_scale.numpy())
    data["x"][row, 0] = 1e30
    model.fit(**data, batch_size=BATCH_SIZE, verbose=0)
    assert all((a == b).all() for a, b in zip(model.get_weights(), before, strict=True))
    assert float(model.optimizer.dynamic_scale.numpy()) == scale / 2
    assert int(model.optimizer.iterations.numpy()) == 1
    data["x"][row, 0] = 0
    model.fit(**data, batch_size=BATCH_SIZE, verbose=0)
    assert not any((a == b).all() for a, b in zip(model.get_weights(), before, strict=True))


def test_sums_are_wider_than_bfloat16() -> None:
    """A thousand gradients of 1/1000 add up to one; in bfloat16 the sum would stop growing at a quarter."""
    keras.config.set_dtype_policy("bfloat16")
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    accumulate(model, 1)
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y_true, y_pred: y_pred[:, 0] * 1.0)
    model.fit(np.ones((1000, 1)), np.ones((1000, 1)), batch_size=1000, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == pytest.approx(-1, abs=4e-3)
