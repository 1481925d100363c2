"""Checks that the tasks of every framework must pass."""

import subprocess
import sys

import numpy as np

from bigbatch.tasks import data

DATASETS = {"digits": data.digits, "digits_batchnorm": data.digits, "text": data.text}


def ragged(task):
    """A batch of 53, which no micro-batch size divides."""
    return next(iter(task.batches(batch_size=53, epoch=0, seed=0)))


def gap(ours, full):
    """The distance of two lists of arrays over all entries, relative to the second."""
    distance = sum(float(((a - b).astype(np.float64) ** 2).sum()) for a, b in zip(ours, full, strict=True))
    return (distance / sum(float((b.astype(np.float64) ** 2).sum()) for b in full)) ** 0.5


def assert_exact(gradients, task, micro_batch_size):
    """`gradients(task, **options)` accumulates, and returns the gradient of the full batch without options."""
    ours = gradients(task, micro_batch_size=micro_batch_size, weight=getattr(task, "weight", None))
    assert gap(ours, gradients(task)) < 1e-5


def assert_mean_of_means_is_wrong(gradients, task):
    """The negative control."""
    ours = gradients(task, micro_batch_size=8, weight=lambda micro_batch: 1)
    assert gap(ours, gradients(task)) > 0.01


def arrays(task, batch_size=100, epoch=0, seed=0):
    return [(np.asarray(x), np.asarray(y)) for x, y in task.batches(batch_size=batch_size, epoch=epoch, seed=seed)]


def assert_batches(task, dataset):
    """All batches but the last have one size, each sample occurs once, and seed and epoch determine the order."""
    first = arrays(task)
    sizes = [len(x) for x, _ in first]
    assert set(sizes[:-1]) == {100}
    assert 0 < sizes[-1] < 100
    assert rows(*map(np.concatenate, zip(*first, strict=True))) == rows(dataset.train.x, dataset.train.y)
    assert is_same(first, arrays(task))
    assert not is_same(first, arrays(task, epoch=1))
    assert not is_same(first, arrays(task, seed=1))
    assert not is_same(arrays(task, epoch=1), arrays(task, seed=1))


def assert_held_out_is_new(dataset):
    """Hardly any of it is trained on; some paragraphs of the help topics differ only by a few words."""
    seen = set(rows(dataset.train.x, dataset.train.y))
    kept = rows(dataset.held_out.x, dataset.held_out.y)
    assert sum(row in seen for row in kept) <= 0.04 * len(kept)
    total = len(dataset.train) + len(dataset.held_out)
    assert 0.12 < len(dataset.held_out) / total < 0.22


def assert_does_not_look_ahead(predict, x):
    """The prediction for a byte does not depend on the bytes after it."""
    changed = x.copy()
    changed[:, 20:] = 7
    ours, theirs = predict(x), predict(changed)
    assert np.allclose(ours[:, :20], theirs[:, :20], atol=1e-5)
    assert not np.allclose(ours[:, 20:], theirs[:, 20:], atol=1e-2)


def assert_untrained_scores(tasks, model_of, most_bits):
    """Untrained models score about like guessing."""
    scores = {name: task.evaluate(model_of(task)) for name, task in tasks.items()}
    assert 0.0 <= scores["digits"]["accuracy"] < 0.5
    assert 0.0 <= scores["digits_batchnorm"]["accuracy"] < 0.5
    assert 7.0 < scores["text"]["bits_per_byte"] < most_bits


def rows(x, y):
    return sorted(a.tobytes() + b.tobytes() for a, b in zip(x, y, strict=True))


def is_same(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all(np.array_equal(x, x2) and np.array_equal(y, y2) for (x, y), (x2, y2) in pairs)


def assert_text_is_ragged():
    """Lengths differ, no row is empty, and a target is the byte after its input."""
    for part in (data.text().train, data.text().held_out):
        lengths = (part.y != data.IGNORED).sum(1)
        assert lengths.min() >= 1
        assert lengths.max() == data.WIDTH
        assert lengths.std() > 10
        for x, y, length in zip(part.x, part.y, lengths, strict=True):
            assert (y[length:] == data.IGNORED).all()
            assert (x[1:length] == y[: length - 1]).all()


def assert_missing_scikit_learn():
    code = """
import sys
sys.modules["sklearn"] = None
from bigbatch import MissingExtraError
from bigbatch.tasks import data
data.text()
try:
    data.digits()
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "the digits come with scikit-learn: pip install scikit-learn", done.stderr
