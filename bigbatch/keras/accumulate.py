"""`accumulate`: fit in micro-batches."""

from collections.abc import Callable
from typing import Any, TypeVar

import keras

from ..core.options import positive
from . import checks
from .backends.step import Backend, FitStep

Model = TypeVar("Model")


def accumulate(model: Model, micro_batch_size: int | None) -> Model:
    """Makes `fit` work in micro-batches; all else about the model stays as it is. Returns the same model.

        model.compile("adam", "mse")
        model.fit(x, y, batch_size=64)        # does not fit into memory

    becomes

        accumulate(model, micro_batch_size=8)
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=64)        # the same weights, the same history

    A step of `fit` is still a step of the optimizer: its batch is cut into micro-batches inside the step, their
    gradients add up, weighted by what each counts, and the optimizer is called once. Metrics see the whole batch.
    It does not matter whether `compile` came before. Calling it again changes the size;
    `accumulate(model, None)` takes it back.
    """
    checks.check_model(model)
    if micro_batch_size is not None:
        micro_batch_size = positive("micro_batch_size", micro_batch_size)
    fitted: Any = model
    checks.check_train_step(fitted)
    if fitted.compiled:
        checks.check_optimizer(fitted.optimizer)
    backend = backend_of_keras()
    if (step := FitStep.of(fitted)) is not None:
        step.detach()
    if micro_batch_size is not None:
        FitStep(fitted, micro_batch_size, backend).attach()
    fitted.train_function = fitted.test_function = None  # what fit compiled before has the old step in it
    return model


def backend_of_keras() -> Callable[[FitStep], Backend]:
    """The backend that Keras runs on, which is imported here and not before."""
    match keras.backend.backend():
        case "tensorflow":
            from .backends.tensorflow import TensorFlowStep

            return TensorFlowStep
        case "jax":
            from .backends.jax import JAXStep

            return JAXStep
        case "torch":
            from .backends.torch import TorchStep

            return TorchStep
        case name:
            raise checks.no_backend(name)
