"""The shared cases: ragged, masked and uneven. They use only NumPy, so that every framework trains on the same data.

The data are scikit-learn's handwritten digits and the text of Python's own help topics.
"""

from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics
from typing import Literal

import numpy as np
from sklearn.datasets import load_digits

Kind = Literal["samples", "tokens", "terms"]
IGNORED = -100
VOCABULARY = 128


@dataclass(frozen=True)
class Problem:
    """Batches to train on, one step each, and the size of their micro-batches.

    `samples`: inputs x and classes y; the loss is a mean over samples.
    `tokens`: token ids x and next tokens y, IGNORED where padded; the loss is a mean over the tokens that are not.
    `terms`: as `tokens`, with a second term per sample: predict the number z from the mean of the row.
    """

    name: str
    kind: Kind
    batches: tuple[dict[str, np.ndarray], ...]
    micro_batch_size: int
    clip_norm: float | None = None

    @property
    def accumulation_steps(self) -> int:
        return -(-len(self.batches[0]["x"]) // self.micro_batch_size)

    @property
    def is_uneven(self) -> bool:
        """Whether a mean over micro-batches is wrong here."""
        return self.kind != "samples" or any(len(batch["x"]) % self.micro_batch_size for batch in self.batches)


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    images, classes = load_digits(return_X_y=True)
    return images / 16.0, classes.astype(np.int64)


def samples(*sizes: int, first: int = 0) -> tuple[dict[str, np.ndarray], ...]:
    """Batches of digits, sorted by class within a batch so that micro-batches differ."""
    images, classes = digits()
    batches = []
    for size in sizes:
        x, y = images[first : first + size], classes[first : first + size]
        order = np.argsort(y, kind="stable")
        batches.append({"x": x[order], "y": y[order]})
        first += size
    return tuple(batches)


def tokens(*lengths: int, width: int | None = None) -> dict[str, np.ndarray]:
    """A batch of texts with these numbers of predicted tokens, padded to one width."""
    width = width or max(lengths)
    x = np.zeros((len(lengths), width), np.int64)
    y = np.full((len(lengths), width), IGNORED, np.int64)
    for row, (length, text) in enumerate(zip(lengths, topics.values(), strict=False)):
        ids = np.frombuffer(text.encode("ascii", "replace")[: length + 1], np.uint8).astype(np.int64)
        x[row, :length], y[row, :length] = ids[:-1], ids[1:]
    return {"x": x, "y": y, "z": np.array(lengths) / width}


def problems() -> list[Problem]:
    digits13 = samples(13)
    text = tokens(3, 60, 17, 40)
    return [
        Problem("equal micro-batches", "samples", samples(64), 16),
        Problem("sizes 16, 16, 16, 5", "samples", samples(53), 16),
        Problem("windows of 4 and 2", "samples", samples(64, 25), 16),
        Problem("tokens 3 / 60 / 17 / 40", "tokens", (text,), 1),
        Problem("a micro-batch without a token", "tokens", (tokens(3, 60, 0, 40, 21),), 1),
        Problem("clipped to norm 0.1", "samples", samples(53), 16, clip_norm=0.1),
        Problem("two terms, each by its own count", "terms", (tokens(3, 60, 17, 40, 5),), 2),
        *(
            Problem(f"micro-batch size {name}", "samples", digits13, size)
            for name, size in (("1", 1), ("2", 2), ("3", 3), ("n-1", 12), ("n", 13))
        ),
    ]
