"""Moving statistics of BatchNormalization from the data themselves, before evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
from keras import ops, tree
from keras.src.trainers.data_adapters import get_data_adapter

from ..core.errors import OptionError
from ..core.moments import Moments, pool
from . import checks
from .batch_norm import moments_of


def recalibrate(model: Any, data: Any, *, batch_size: int | None = None) -> None:
    """Sets the moving statistics of BatchNormalization to mean and variance over the data.

        recalibrate(model, x)
        model.evaluate(x_test, y_test)

    The result does not depend on the size of the batches: the first layer gets mean and variance of its input over all
    data, then the second layer those of its own, with the first as it is now, and so on:

        for layer in BatchNormalization layers, in the order in which they run:
            inputs = what the layer gets, for all data, from model(x, training=False)
            layer.moving_mean, layer.moving_variance = mean(inputs), variance(inputs)

    That takes one pass over the data for each layer, without gradients. The weights do not change.

    Args:
        model: The model; it need not be compiled. Layers that are not trainable are left alone.
        data: The inputs: arrays, or a dataset, PyDataset or DataLoader, as for `fit`. Targets are ignored.
        batch_size: The size of the batches if `data` are arrays; 32 by default, as in Keras.

    Raises:
        OptionError: The model has no BatchNormalization to set, or the data can be read only once.
    """
    checks.check_model(model)
    if _is_read_once(data):
        raise OptionError(
            "recalibrate() reads the data once for each layer, and a generator can be read only once: pass arrays, a "
            "dataset or a PyDataset"
        )
    order: dict[int, Any] = {}
    for x in _batches(data, batch_size):
        with _watching([*_layers(model)]) as seen:
            model(x, training=False)
        order = {id(layer): layer for layer, _ in seen}
        break
    if not order:
        raise OptionError(
            "the model calls no BatchNormalization layer that is trainable, so there is nothing to recalibrate"
        )
    for layer in order.values():
        pooled: Moments | None = None
        for x in _batches(data, batch_size):
            with _watching([layer]) as seen:
                model(x, training=False)
            for _, moments in seen:
                pooled = moments if pooled is None else pool(pooled, moments, ops.where)
        assert pooled is not None
        layer.moving_mean.assign(pooled.mean)
        layer.moving_variance.assign(pooled.variance(ops.where))


def _is_read_once(data: Any) -> bool:
    return iter(data) is data if hasattr(data, "__iter__") and not tree.is_nested(data) else False


def _layers(model: Any) -> Iterator[Any]:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            yield layer


def _batches(data: Any, batch_size: int | None) -> Iterator[Any]:
    """x of each batch, as tensors."""
    adapter = get_data_adapter(x=data, batch_size=batch_size)
    for batch in adapter.get_numpy_iterator():
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        yield tree.map_structure(keras.ops.convert_to_tensor, x)


@contextmanager
def _watching(layers: list[Any]) -> Iterator[list[tuple[Any, Moments]]]:
    """Inside, yields a list of layers and the moments of their inputs, in the order of their calls."""
    found: list[tuple[Any, Moments]] = []
    without_gradients: Any = nullcontext()
    if keras.backend.backend() == "torch":
        import torch

        without_gradients = torch.no_grad()

    def watched(layer: Any) -> Any:
        def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            found.append((layer, moments_of(layer, inputs, mask)))
            return type(layer).call(layer, inputs, training=training, mask=mask)

        return call

    for layer in layers:
        vars(layer)["call"] = watched(layer)
    try:
        with without_gradients:
            yield found
    finally:
        for layer in layers:
            vars(layer).pop("call", None)
