"""accumulate(model, accumulation_steps=4): fit on micro-batches gives the result of plain fit on whole windows."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from bigbatch import LossError, OptionError
from bigbatch.keras import accumulate

from .cases import CASES, Case, compiled, entropy, gap, images, mlp, sgd
from .test_exactness import BACKEND, tolerance

MICRO = (5, 3, 4, 2, 4, 1)  # with 4 in a step: a window of 14 and, at the end of the epoch, one of 5
WHOLE = (14, 5)
STEPS = 4


def batches(data: dict[str, Any], sizes: Iterable[int]) -> list[Any]:
    """x, y and sample_weight in batches of these sizes."""
    ends = list(itertools.accumulate(sizes))
    whole = tuple(data[name] for name in ("x", "y", "sample_weight") if name in data)
    return [
        keras.tree.map_structure(lambda array: np.take(array, range(a, b), axis=0, mode="wrap"), whole)  # noqa: B023
        for a, b in itertools.pairwise([0, *ends])
    ]


class Feed(keras.utils.PyDataset):
    def __init__(self, data: list[Any]) -> None:
        super().__init__()
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def fit(case: Case, accumulation_steps: int | None, **options: Any) -> tuple[Any, dict[str, list[float]]]:
    keras.utils.set_random_seed(7)
    model = case.build()
    if accumulation_steps:
        assert accumulate(model, accumulation_steps=accumulation_steps) is model
    model.compile(**{"optimizer": sgd(case.momentum), **case.compile(), **options})
    data = {**case.data()}
    feed = Feed(batches(data, MICRO if accumulation_steps else WHOLE))
    class_weight = {"class_weight": data["class_weight"]} if "class_weight" in data else {}
    return model, model.fit(feed, epochs=2, verbose=0, shuffle=False, **class_weight).history


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


ON_ALL = ("a compute_loss of its own", "two outputs, one masked")
NAMES = (
    *ON_ALL,
    "regularizers",
    "masked rows, weighted",
    "a subclass that adds a loss",
    "reduction sum",
    "sample_weight, divided by it",
    "class_weight",
    "text with ignored tokens",
)


@pytest.mark.parametrize(
    "name", [name if name in ON_ALL else pytest.param(name, marks=pytest.mark.any_backend) for name in NAMES]
)
@pytest.mark.usefixtures("float64")
def test_exact_in_float64(name: str) -> None:
    case = case_of(name)
    ours, plain = fit(case, STEPS), fit(case, None)
    of_keras = {
        "tensorflow": ["token_loss", "digit_loss"],  # Keras gives each batch the same weight here
        "torch": ["weighted_accuracy"],  # Keras multiplies a mask into these weights in place
    }.get(BACKEND, [])
    ours, plain = [(model, {k: v for k, v in h.items() if k not in of_keras}) for model, h in (ours, plain)]
    is_rounded = BACKEND == "jax" and name == "a compute_loss of its own"  # Keras 3.15 adds its metric up in float32
    assert gap(ours, plain) < (1e-6 if is_rounded else tolerance(case))


@pytest.mark.any_backend
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["digits", "sample_weight, divided by it", "masked rows, no metrics"])
def test_negative_control_keras_accumulation(name: str) -> None:
    """Keras's own accumulation divides by 4, and its step spans two epochs."""
    case = case_of(name)
    keras.utils.set_random_seed(7)
    model = case.build()
    model.compile(sgd(case.momentum, gradient_accumulation_steps=STEPS), **case.compile())
    history = model.fit(Feed(batches(case.data(), MICRO)), epochs=2, verbose=0, shuffle=False).history
    assert gap((model, history), fit(case, None)) > 0.01
    assert int(model.optimizer.iterations) == 3  # not 4


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "weight decay, global norm, schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(1e-2, 1, 0.5), weight_decay=0.1, global_clipnorm=0.1
    ),
    "moving average": lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
}


@pytest.mark.parametrize(
    "name", ["weight decay, global norm, schedule", pytest.param("moving average", marks=pytest.mark.any_backend)]
)
@pytest.mark.usefixtures("float64")
def test_everything_of_a_step_happens_once_per_step(name: str) -> None:
    case = case_of("digits")
    ours, plain = [fit(case, steps, optimizer=OPTIMIZERS[name]()) for steps in (STEPS, None)]
    assert gap(ours, plain) < 10 * tolerance(case)
    assert int(ours[0].optimizer.iterations) == 4


MODES = {
    "tensorflow": [{}, {"run_eagerly": True}, {"jit_compile": True}],
    "jax": [pytest.param({"run_eagerly": True}, marks=pytest.mark.slow)],
    "torch": [],
}[BACKEND]


@pytest.mark.compiled
@pytest.mark.parametrize("options", MODES, ids=str)
def test_modes(options: dict[str, Any]) -> None:
    case = case_of("masked rows, weighted")
    assert gap(fit(case, STEPS, **options), fit(case, None)) < 1e-5


@pytest.mark.any_backend
def test_low_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    case = case_of("no metrics")
    assert gap(fit(case, STEPS), fit(case, None)) < 5e-3


# --- where an epoch ends ---------------------------------------------------------------------------------


class Ends(keras.callbacks.Callback):
    """Notes the calls of callbacks, with the number of steps so far."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("end", batch, sorted(logs)))


def forever(data: list[Any]) -> Iterator[Any]:
    while True:
        yield from data


def data_loader(data: list[Any]) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def once(data: list[Any]) -> Iterator[Any]:
    yield from data


def tf_dataset(data: list[Any]) -> Any:
    import tensorflow as tf

    types = tuple(tf.TensorSpec((None,) * array.ndim, array.dtype) for array in data[0])
    return tf.data.Dataset.from_generator(lambda: iter(data), output_signature=types)


FEEDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "a generator without end": (forever, {"steps_per_epoch": 6}),
    "a PyDataset": (Feed, {}),
    "a PyDataset with steps_per_epoch": (Feed, {"steps_per_epoch": 6}),
    "a tf.data.Dataset of unknown length": (tf_dataset, {}),
    "a torch DataLoader": (data_loader, {}),
}


ON_EACH = ("a generator without end", "a tf.data.Dataset of unknown length")


@pytest.mark.parametrize(
    "name", [name if name in ON_EACH else pytest.param(name, marks=pytest.mark.any_backend) for name in FEEDS]
)
@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")
def test_the_rest_is_a_step_at_the_end_of_each_epoch(name: str) -> None:
    """Two windows in each of two epochs; a window that spanned epochs would make three steps in all."""
    feed, options = FEEDS[name]
    ends = Ends()
    keras.utils.set_random_seed(7)
    model = accumulate(mlp(), accumulation_steps=STEPS)
    model.compile(sgd(), **entropy()())
    data = batches(images()(), MICRO)
    history = model.fit(feed(data), epochs=2, verbose=0, shuffle=False, callbacks=[ends], **options).history
    assert gap((model, history), fit(case_of("digits"), None)) < 1e-5
    of_one = [("begin", 0), ("end", 3, ["accuracy", "loss"]), ("begin", 4), ("end", 5, ["accuracy", "loss"])]
    calls = [call for call in ends.calls if call != ("begin", 8)]
    assert calls == [0, *of_one, 1, *of_one]
    assert int(model.optimizer.iterations) == 4


def test_a_generator_that_ends() -> None:
    keras.utils.set_random_seed(7)
    model = accumulate(mlp(), accumulation_steps=STEPS)
    model.compile(sgd(), **entropy()())
    data = batches(images()(), MICRO)
    with pytest.warns(UserWarning, match="ran out of data"):  # as without accumulate()
        model.fit(once(data), verbose=0, shuffle=False)
    model.fit(once(data), verbose=0, shuffle=False, steps_per_epoch=6)
    plain = fit(case_of("digits"), None)
    assert gap((model, {}), (plain[0], {})) < 1e-5


@pytest.mark.any_backend
def test_arrays_validation_and_evaluate() -> None:
    """batch_size is then that of a micro-batch, and evaluation is not grouped."""
    model, plain = accumulate(compiled(None), accumulation_steps=4), compiled(None)
    options = {**images()(), "validation_split": 0.2, "verbose": 0, "shuffle": False, "epochs": 2}
    ours = model.fit(batch_size=6, **options).history
    theirs = plain.fit(batch_size=24, validation_batch_size=7, **options).history
    assert gap((model, ours), (plain, theirs)) < 1e-5
    scores = [each.evaluate(**images()(), batch_size=10, verbose=0) for each in (model, plain)]
    assert np.allclose(*scores, rtol=1e-5)
    again = [each.fit(batch_size=size, **options).history for each, size in ((model, 6), (plain, 24))]
    assert gap((model, again[0]), (plain, again[1])) < 1e-4


@pytest.mark.any_backend
@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")
def test_micro_batches_of_different_widths() -> None:
    """Texts padded to the longest of each micro-batch, and of the whole batch for plain fit."""
    case = case_of("text with ignored tokens")
    whole = case.data()

    def narrow(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        width = max(2, int((y >= 0).sum(1).max()))
        return x[:, :width], y[:, :width]

    def build() -> Any:
        return keras.Sequential([layers.Input((None,)), layers.Embedding(128, 12), layers.Dense(128)])

    fits = []
    for steps in (STEPS, None):
        keras.utils.set_random_seed(7)
        model = build()
        if steps:
            accumulate(model, accumulation_steps=steps)
        model.compile(sgd(0.0), **{**case.compile(), "metrics": None})
        data = [narrow(*each) for each in batches(whole, MICRO if steps else WHOLE)]
        fits.append((model, model.fit(tf_dataset(data), epochs=2, verbose=0, shuffle=False).history))
    assert gap(*fits) < 1e-5


def test_train_on_batch_is_a_step() -> None:
    data = batches(images()(), WHOLE)
    logs = []
    for model in (accumulate(compiled(None), accumulation_steps=4), compiled(None)):
        logs.append([model.train_on_batch(*each, return_dict=True) for each in data])
        assert int(model.optimizer.iterations) == 2
    for ours, plain in zip(*logs, strict=True):
        assert {name: pytest.approx(float(value), rel=1e-5) for name, value in plain.items()} == ours


# --- changed and refused ---------------------------------------------------------------------------------


@pytest.mark.any_backend
def test_from_one_way_to_the_other_and_back() -> None:
    model = accumulate(compiled(None), accumulation_steps=STEPS)
    data = images()()
    model.fit(**data, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 4  # 15 micro-batches
    accumulate(model, 8).fit(**data, batch_size=32, verbose=0)
    assert int(model.optimizer.iterations) == 8
    accumulate(model, None).fit(**data, batch_size=32, verbose=0)
    assert int(model.optimizer.iterations) == 12
    assert not {"train_step", "make_train_function", "_symbolic_build", "_maybe_symbolic_build"} & set(vars(model))


@pytest.mark.any_backend
def test_refused() -> None:
    with pytest.raises(OptionError, match="got micro_batch_size=8 and accumulation_steps=4: pass"):
        accumulate(mlp(), 8, accumulation_steps=4)
    with pytest.raises(OptionError, match="accumulation_steps is 0: pass a whole number"):
        accumulate(mlp(), accumulation_steps=0)
    model = accumulate(compiled(None, steps_per_execution=2), accumulation_steps=4)
    with pytest.raises(OptionError, match="steps_per_execution=2, and accumulation_steps=4"):
        model.fit(**images()(), verbose=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    with pytest.raises(LossError, match='reduction "none"'):
        accumulate(compiled(None, loss=loss), accumulation_steps=4).fit(**images()(), verbose=0)
