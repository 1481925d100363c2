"""The data of the built-in tasks, and how they are scored. NumPy only, so that every framework trains on the same.

Nothing is downloaded: the digits come with scikit-learn, the text with Python itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import MissingExtraError

Array = NDArray[Any]
Predict = Callable[[Array], Array]
"""The logits of some inputs."""

IGNORED = -100
"""The target where there is nothing to predict: beyond the end of a text."""
NUM_BYTES = 256
WIDTH = 64
"""How many bytes of a text are predicted at most; all texts are padded to it."""
CHUNK = 128
"""How many held-out samples are scored at a time."""


@dataclass(frozen=True)
class Samples:
    """Inputs and targets, one row for each sample."""

    x: Array
    y: Array

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: Any) -> tuple[Array, Array]:
        return self.x[index], self.y[index]


@dataclass(frozen=True)
class Dataset:
    """What is trained on, and what is kept back to score with."""

    train: Samples
    held_out: Samples

    def batches(self, batch_size: int, epoch: int, seed: int) -> list[tuple[Array, Array]]:
        """Every training sample once, in an order of this seed and epoch; the last batch may be smaller."""
        order = np.random.default_rng((seed, epoch)).permutation(len(self.train))
        return [self.train.rows(order[start : start + batch_size]) for start in range(0, len(order), batch_size)]

    def chunks(self) -> Iterator[tuple[Array, Array]]:
        """The held-out samples, a few at a time."""
        for start in range(0, len(self.held_out), CHUNK):
            yield self.held_out.rows(slice(start, start + CHUNK))


@cache
def digits() -> Dataset:
    """Handwritten digits: images of 8 by 8 with values from 0 to 1, and the digit that each shows."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("the digits come with scikit-learn: pip install scikit-learn") from error
    found = load_digits()
    samples = Samples((found.images / 16.0).astype(np.float32), found.target.astype(np.int64))
    kept, rest = split(len(samples))
    return Dataset(Samples(*samples.rows(rest)), Samples(*samples.rows(kept)))


@cache
def text() -> Dataset:
    """The paragraphs of Python's help topics, in pieces of uneven length; the target of a byte is the next one.

    Whole paragraphs are held out, and those that several topics share word for word count once, so that hardly
    any piece (about one in forty) that is scored was also trained on.
    """
    paragraphs = dict.fromkeys(part for topic in topics.values() for part in topic.split("\n\n") if len(part) > 1)
    documents = [paragraph.encode() for paragraph in paragraphs]
    kept, rest = split(len(documents))
    return Dataset(pieces([documents[k] for k in rest]), pieces([documents[k] for k in kept]))


def split(num: int) -> tuple[Array, Array]:
    """A sixth of so many, and the rest; always the same."""
    order = np.random.default_rng(0).permutation(num)
    return order[: num // 6], order[num // 6 :]


def pieces(documents: list[bytes]) -> Samples:
    """Pieces of at most WIDTH + 1 bytes, each as long as it happens to be, padded to WIDTH inputs and targets."""
    cut = [text[start : start + WIDTH + 1] for text in documents for start in range(0, len(text) - 1, WIDTH)]
    x = np.zeros((len(cut), WIDTH), np.int64)
    y = np.full((len(cut), WIDTH), IGNORED, np.int64)
    for row, piece in enumerate(cut):
        values = np.frombuffer(piece, np.uint8)
        x[row, : len(piece) - 1], y[row, : len(piece) - 1] = values[:-1], values[1:]
    return Samples(x, y)


def accuracy(predict: Predict) -> float:
    """The share of the held-out digits that are recognised."""
    right = sum(int((predict(x).argmax(-1) == y).sum()) for x, y in digits().chunks())
    return right / len(digits().held_out)


def bits_per_byte(predict: Predict) -> float:
    """What a byte of the held-out text costs, in bits: 8 for a model that knows nothing."""
    bits = sum(cost(predict(x), y) for x, y in text().chunks())
    return bits / int((text().held_out.y != IGNORED).sum())


def cost(logits: Array, y: Array) -> float:
    """How many bits it takes to tell the targets, given these predictions."""
    is_counted = y != IGNORED
    chosen, targets = logits[is_counted].astype(np.float64), y[is_counted]
    logs = np.logaddexp.reduce(chosen, axis=-1) - chosen[np.arange(len(targets)), targets]
    return float(logs.sum() / np.log(2.0))
