"""How numbers and names are written, on the screen and in a report; and the sentences of a report."""

import json
import math
from collections.abc import Sequence

from ..summary import Summary
from .run import Run

Number = int | float


def exact(value: Number | None) -> str:
    """The number as in summary.json."""
    return json.dumps(value) if value is None or math.isfinite(value) else str(float(value))


def number(value: Number | None) -> str:
    """Six digits, which are enough to tell two losses apart; a missing or non-finite number in words."""
    if value is None:
        return "not known"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def difference(value: Number) -> str:
    """The size of a difference, with two digits."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else number(value)


def duration(seconds: Number | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return number(seconds)
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def rate(samples_per_second: Number | None) -> str:
    if samples_per_second is None or not math.isfinite(samples_per_second):
        return number(samples_per_second)
    return f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.3g}"


def unit_of(num_bytes: Number) -> tuple[str, int]:
    """The largest unit that fits, and its number of bytes."""
    units = [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)]
    name, power = [unit for unit in units if abs(num_bytes) >= 2 ** unit[1] or unit[1] == 0][-1]
    return name, int(2**power)


def size(num_bytes: Number | None) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return number(num_bytes)
    name, unit = unit_of(num_bytes)
    count = num_bytes / unit
    return f"{count:.0f} {name}" if count >= 100 or unit == 1 else f"{count:.3g} {name}"


def count(num: int, noun: str) -> str:
    """'1 step', '48 steps', '2 micro-batches'."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{num:,} {noun if num == 1 else plural}"


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def headline(summary: Summary) -> str:
    """What was trained, and how far it ended from full-batch training."""
    is_even = summary.batch_size == summary.num_micro_batches * summary.micro_batch_size
    batch = (
        f"a batch of {summary.batch_size:,} in {count(summary.num_micro_batches, 'micro-batch')} of "
        f"{'' if is_even else 'at most '}{summary.micro_batch_size:,}"
    )
    ended = "" if summary.status == "finished" else f", then {summary.status}"
    steps = count(summary.num_steps, "step")
    return f"{summary.task} on {summary.framework}: {steps} with {batch}{ended}; {_verdict(summary)}"


def _verdict(summary: Summary) -> str:
    """How far the weights are from those of the full batch, or why that is not known."""
    full_batch, comparison = summary.full_batch, summary.comparison
    if full_batch is not None and not full_batch.is_finished:
        return f"full-batch training {full_batch.status}, so there is nothing to compare with"
    if comparison is None:
        return "it was not compared with full-batch training"
    distance = comparison.max_weight_difference
    if distance == 0:
        return "the weights are exactly those of full-batch training"
    if not math.isfinite(distance):
        return "the weights cannot be compared with those of full-batch training, since some are not finite"
    return f"the weights differ from those of full-batch training by at most {distance:.0e}"


def remarks(run: Run) -> list[str]:
    """What a reader should know before trusting the figures."""
    summary, full_batch = run.summary, run.summary.full_batch
    sentences = []
    if summary.loss is not None and not math.isfinite(summary.loss):
        sentences.append(f"The loss of the last epoch is {number(summary.loss)}: the training did not converge.")
    num_skipped = sum(not record.is_applied for record in run.records)
    if num_skipped:
        sentences.append(
            f"{num_skipped:,} of {count(len(run.records), 'step')} left the weights alone, "
            "since the gradient was not finite or the batch had no weight."
        )
    if full_batch is not None and not full_batch.is_finished:
        sentences.append(f"Full-batch training {full_batch.status}: {full_batch.reason}.")
    return sentences
