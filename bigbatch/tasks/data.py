"""The data of the built-in tasks, and their scores. All in NumPy, so that every framework trains on the same data.

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
_Predict = Callable[[Array], Array]  # returns the logits of some inputs

IGNORED = -100  # the target where there is nothing to predict: beyond the end of a text
NUM_BYTES = 256
WIDTH = 64  # the largest number of bytes of a text that are predicted; all texts are padded to it
_CHUNK = 128  # how many held-out samples are scored at a time


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
    """The samples to train on, and those held out to score with."""

    train: Samples
    held_out: Samples

    def batches(self, batch_size: int, epoch: int, seed: int) -> list[tuple[Array, Array]]:
        """Every training sample once, in an order given by seed and epoch; the last batch may be smaller."""
        order = np.random.default_rng((seed, epoch)).permutation(len(self.train))
        return [self.train.rows(order[start : start + batch_size]) for start in range(0, len(order), batch_size)]

    def chunks(self) -> Iterator[tuple[Array, Array]]:
        """The held-out samples, a few at a time."""
        for start in range(0, len(self.held_out), _CHUNK):
            yield self.held_out.rows(slice(start, start + _CHUNK))


@cache
def digits() -> Dataset:
    """Handwritten digits: images of 8 by 8 with values from 0 to 1, and the digit that each shows."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("the digits come with scikit-learn: pip install scikit-learn") from error
    loaded = load_digits()
    samples = Samples((loaded.images / 16.0).astype(np.float32), loaded.target.astype(np.int64))
    kept, rest = _split(len(samples))
    return Dataset(Samples(*samples.rows(rest)), Samples(*samples.rows(kept)))


@cache
def text() -> Dataset:
    """The paragraphs of Python's help topics, in pieces of uneven length; the target of a byte is the next one.

    Whole paragraphs are held out, and a paragraph that several topics share counts once. So hardly any piece that is
    scored (about one in forty) is also trained on.
    """
    paragraphs = dict.fromkeys(part for topic in topics.values() for part in topic.split("\n\n") if len(part) > 1)
    documents = [paragraph.encode() for paragraph in paragraphs]
    kept, rest = _split(len(documents))
    return Dataset(_pieces([documents[k] for k in rest]), _pieces([documents[k] for k in kept]))


def _split(num: int) -> tuple[Array, Array]:
    """The indices of a sixth that is held out, and those of the rest; always the same."""
    order = np.random.default_rng(0).permutation(num)
    return order[: num // 6], order[num // 6 :]


def _pieces(documents: list[bytes]) -> Samples:
    """Pieces of at most WIDTH + 1 bytes, each as long as it happens to be, padded to WIDTH inputs and targets."""
    cut = [text[start : start + WIDTH + 1] for text in documents for start in range(0, len(text) - 1, WIDTH)]
    x = np.zeros((len(cut), WIDTH), np.int64)
    y = np.full((len(cut), WIDTH), IGNORED, np.int64)
    for row, piece in enumerate(cut):
        values = np.frombuffer(piece, np.uint8)
        x[row, : len(piece) - 1], y[row, : len(piece) - 1] = values[:-1], values[1:]
    return Samples(x, y)


def accuracy(predict: _Predict) -> float:
    """The fraction of the held-out digits that are recognised."""
    right = sum(int((predict(x).argmax(-1) == y).sum()) for x, y in digits().chunks())
    return right / len(digits().held_out)


def bits_per_byte(predict: _Predict) -> float:
    """The cost of a byte of the held-out text in bits: 8 for a model that knows nothing."""
    bits = sum(_cost(predict(x), y) for x, y in text().chunks())
    return bits / int((text().held_out.y != IGNORED).sum())


def _cost(logits: Array, y: Array) -> float:
    """How many bits it takes to write the targets down, given these predictions."""
    is_counted = y != IGNORED
    chosen, targets = logits[is_counted].astype(np.float64), y[is_counted]
    logs = np.logaddexp.reduce(chosen, axis=-1) - chosen[np.arange(len(targets)), targets]
    return float(logs.sum() / np.log(2.0))
