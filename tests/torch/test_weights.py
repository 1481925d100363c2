"""Ready-made weights: each gives the gradient of the full batch, and its near misses do not."""

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.tokenization_utils_base import BatchEncoding

from bigbatch import BatchError, BigBatchWarning, OptionError, WeightError, Window
from bigbatch.torch import Accumulator, verify, weights
from bigbatch.torch.cutting import Cutting
from bigbatch.torch.window import fetch_weights
from tests.problems import IGNORED, VOCABULARY, Problem, samples, tokens

from .training import Language, make_batches, make_model

Loss = Callable[[nn.Module, Any], Tensor]
LENGTHS = (3, 60, 17, 40, 2, 9, 31)
SIZES = (1, 2, 3, 6, 7)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(model: nn.Module, loss: Loss, batch: Any, size: int, full: Any = None, **options: Any) -> float:
    """The relative error of the update of one SGD step against that on `full`, the plain batch."""
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    accumulator = Accumulator(ours, torch.optim.SGD(ours.parameters(), lr=1.0), loss, size, **options)
    assert accumulator.step(batch).is_applied
    loss(plain, batch if full is None else full).backward()
    trained = [name for name, p in plain.named_parameters() if p.grad is not None]
    before, after = dict(model.named_parameters()), dict(ours.named_parameters())
    update = torch.cat([(before[name] - after[name]).detach().flatten() for name in trained])
    return float((update - gradient(plain)).norm() / gradient(plain).norm())


def texts() -> dict[str, Tensor]:
    """Token ids as labels, as Hugging Face's causal models take them: not shifted."""
    batch = tokens(*LENGTHS)
    ids = np.concatenate([batch["x"], np.zeros((len(LENGTHS), 1), np.int64)], 1)
    labels = np.full_like(ids, IGNORED)
    for row, length in enumerate(LENGTHS):
        ids[row, length] = batch["y"][row, length - 1]
        labels[row, : length + 1] = ids[row, : length + 1]
    return {"input_ids": torch.as_tensor(ids), "labels": torch.as_tensor(labels)}


# --- causal language models ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def shifted_loss(model: nn.Module, batch: Any) -> Tensor:
    """Hugging Face's loss, which computes in float32, in float64."""
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


@pytest.mark.parametrize("size", SIZES)
def test_causal_lm_tokens_is_exact_and_unshifted_counting_is_not(gpt2: nn.Module, size: int) -> None:
    assert error(gpt2, shifted_loss, texts(), size, weight=weights.causal_lm_tokens) <= 1e-12
    unshifted = error(gpt2, shifted_loss, texts(), size, weight=weights.tokens())
    by_samples = error(gpt2, shifted_loss, texts(), size, weight=lambda batch: len(batch["labels"]))
    if size < len(LENGTHS):
        assert unshifted > 1e-3
        assert by_samples > 1e-2


def test_the_loss_of_a_hugging_face_model(gpt2: nn.Module) -> None:
    model = copy.deepcopy(gpt2).float()
    assert error(model, own_loss, BatchEncoding(texts()), 2, weight=weights.causal_lm_tokens) <= 1e-5
    assert error(model, own_loss, BatchEncoding(texts()), 2, weight=weights.tokens()) > 1e-2


def test_verify_agrees(gpt2: nn.Module) -> None:
    assert verify(gpt2, texts(), shifted_loss, 3, weight=weights.causal_lm_tokens).is_exact
    assert not verify(gpt2, texts(), shifted_loss, 3, weight=weights.tokens()).is_exact


# --- tokens ----------------------------------------------------------------------------------------------

TOKENS = Problem("tokens", "tokens", (tokens(3, 60, 0, 40, 21),), 1)


def smooth(model: nn.Module, batch: Any) -> Tensor:
    """Label smoothing also divides by the number of labels that are not ignored."""
    logits, _ = model(batch["x"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED, label_smoothing=0.2
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_of_a_padded_batch_with_label_smoothing(size: int) -> None:
    model, batch = make_model(TOKENS), make_batches(TOKENS)[0]
    assert error(model, smooth, batch, size, weight=weights.tokens("y")) <= 1e-12
    assert error(model, smooth, batch, size, weight=weights.tokens("y", shift=True)) > 1e-3


class Named(NamedTuple):
    x: Tensor
    labels: Tensor


@dataclasses.dataclass
class Record:
    x: Tensor
    labels: Tensor


LABELS = torch.tensor([[1, 2, IGNORED], [IGNORED, 4, 5]])
PIXELS = torch.tensor([156, 3, 255], dtype=torch.uint8)
X = torch.zeros(2, 3)
FOUND: dict[str, tuple[Any, Any, int]] = {
    "dict": ({"x": X, "labels": LABELS}, weights.tokens(), 4),
    "BatchEncoding": (BatchEncoding({"x": X, "labels": LABELS}), weights.tokens(), 4),
    "NamedTuple": (Named(X, LABELS), weights.tokens(), 4),
    "dataclass": (Record(X, LABELS), weights.tokens(), 4),
    "tuple": ((X, LABELS), weights.tokens(1), 4),
    "list, from the end": ([X, LABELS], weights.tokens(-1), 4),
    "function": ((X, {"y": LABELS}), weights.tokens(lambda batch: batch[1]["y"]), 4),
    "key": ({"y": LABELS}, weights.tokens("y"), 4),
    "ignore_index": ({"labels": LABELS}, weights.tokens(ignore_index=5), 5),
    "shifted": ({"labels": LABELS}, weights.causal_lm_tokens, 3),
    "shifted, by option": ((X, LABELS), weights.tokens(1, shift=True), 3),
    "uint8": ({"labels": PIXELS}, weights.tokens(), 3),
    "uint8, 255 ignored": ({"labels": PIXELS}, weights.tokens("labels", 255), 2),
    "all ignored": ({"labels": LABELS.new_full((2, 3), IGNORED)}, weights.tokens(), 0),
    "sequences of one token": ({"labels": torch.ones(4, 1, dtype=torch.int64)}, weights.causal_lm_tokens, 0),
    "classes": ({"labels": LABELS}, weights.class_weights([9, 0.5, 2.0, 9, 1, 4]), 7.5),
    "classes, shifted": ({"labels": LABELS}, weights.class_weights([9, 0.5, 2.0, 9, 1, 4], shift=True), 7),
    "classes, all ignored": ({"labels": LABELS.new_full((2, 3), IGNORED)}, weights.class_weights([1.0]), 0),
    "mask": ({"mask": LABELS > 0}, weights.sample_weights("mask"), 4),
    "sample weights": ({"sample_weight": torch.tensor([0.5, 2.25])}, weights.sample_weights(), 2.75),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_where_labels_are_found_and_what_is_counted(name: str) -> None:
    batch, weight, expected = FOUND[name]
    assert fetch_weights([(weight(batch),)]) == [(expected,)]
    assert (
        fetch_weights([(pickle.loads(pickle.dumps(weight))(batch),)]) == [(expected,)] if name != "function" else True
    )


def test_results_are_tensors_on_the_device_of_the_labels() -> None:
    """So that a weight does not wait for the device: the meta device has no values to wait for."""
    labels = LABELS.to("meta")
    table = torch.ones(6)
    for weight in (weights.causal_lm_tokens, weights.tokens(), weights.class_weights(table)):
        assert weight({"labels": labels}).is_meta


def test_a_window_whose_labels_are_all_ignored_changes_nothing() -> None:
    model, batch = make_model(TOKENS), make_batches(TOKENS)[0]
    batch["y"] = torch.full_like(batch["y"], IGNORED)
    before = copy.deepcopy(model.state_dict())
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), smooth, 2, weight=weights.tokens("y"))
    step = accumulator.step(batch)
    assert (step.is_applied, step.weight) == (False, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- class weights ---------------------------------------------------------------------------------------

DIGITS = Problem("digits", "samples", samples(13), 4)
CLASSES = torch.tensor([0.1, 3.0, 0.5, 1.0, 2.0, 0.3, 5.0, 0.7, 1.3, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 12, 13])
def test_class_weights(size: int, smoothing: float) -> None:
    model, batch = make_model(DIGITS), make_batches(DIGITS)[0]
    batch["y"] = batch["y"].where(torch.arange(13) % 5 > 0, IGNORED)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=CLASSES, label_smoothing=smoothing)

    assert error(model, loss, batch, size, weight=weights.class_weights(CLASSES, "y")) <= 1e-12
    if size < 13:
        assert error(model, loss, batch, size, weight=weights.tokens("y")) > 1e-2  # as if classes had no weights


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_class_of_weight_zero_is_exact_without_label_smoothing_and_with_a_total(smoothing: float) -> None:
    """Label smoothing gives labels of weight zero a loss; a micro-batch of such labels alone has the weight 0."""
    model, batch, classes = make_model(DIGITS), make_batches(DIGITS)[0], CLASSES.clone()
    classes[5] = 0
    weight = weights.class_weights(classes, "y")

    def loss(model: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(
            model(batch["x"]), batch["y"], weight=classes, label_smoothing=smoothing, reduction=reduction
        )

    def per_total(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch, "sum") / batch["total"]

    is_exact = error(model, loss, batch, 1, weight=weight) <= 1e-12
    assert is_exact == (smoothing == 0)
    whole = weights.with_total(batch, weight)
    assert error(model, per_total, whole, 1, reduction="sum") <= 1e-12
    assert float(whole["total"]) == pytest.approx(float(classes[batch["y"]].sum()))


def test_sample_weights() -> None:
    model, batch = make_model(DIGITS), make_batches(DIGITS)[0]
    batch["sample_weight"] = torch.arange(1, 14, dtype=torch.float64) % 4

    def loss(model: nn.Module, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (each * batch["sample_weight"]).sum() / batch["sample_weight"].sum()

    assert error(model, loss, batch, 4, weight=weights.sample_weights()) <= 1e-12
    assert error(model, loss, batch, 4) > 1e-2


# --- totals over the batch -------------------------------------------------------------------------------


def boxes() -> dict[str, Tensor]:
    """Thirteen images of eight anchors, few of them positive, and some images without any."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 8, 6, dtype=torch.float64, generator=generator)
    y = (torch.rand(13, 8, generator=generator) < 0.15).double()
    y[:4] = 0
    y[5] = 1
    return {"x": x, "y": y, "box": torch.randn(13, 8, 4, dtype=torch.float64, generator=generator)}


def detector() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def positives(batch: Any) -> Tensor:
    return batch["y"].sum()


def focal_sum(found: Tensor, batch: Any) -> Tensor:
    each = F.binary_cross_entropy_with_logits(found[..., 0], batch["y"], reduction="none")
    return (each * (1 - (-each).exp()) ** 2).sum()


def box_sum(found: Tensor, batch: Any) -> Tensor:
    return ((found[..., 1:] - batch["box"]).abs().sum(-1) * batch["y"]).sum()


def per_total(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch["x"])
    return (focal_sum(found, batch) + box_sum(found, batch)) / batch["total"]


def per_own_count(model: nn.Module, batch: Any) -> Tensor:
    """As detectors have it: divided by the positives of the batch that it is given."""
    return per_total(model, {**batch, "total": positives(batch).clamp(min=1)})


@pytest.mark.parametrize("size", [1, 2, 3, 12, 13])
def test_a_loss_divided_by_the_positives_of_the_whole_batch(size: int) -> None:
    batch = boxes()
    whole = weights.with_total(batch, positives)
    assert "total" not in batch
    assert whole["total"].shape == ()
    assert error(detector(), per_total, whole, size, {**batch, "total": positives(batch)}, reduction="sum") <= 1e-12
    if size == 2:
        assert verify(detector(), whole, per_total, size, reduction="sum").is_exact


def test_a_weight_is_enough_only_if_negatives_do_not_count() -> None:
    """A micro-batch without positives has the weight 0, and its negatives would be lost."""
    batch = boxes()
    assert error(detector(), per_own_count, batch, 2, weight=positives) > 1e-2

    def box_mean(model: nn.Module, batch: Any) -> Tensor:
        return box_sum(model(batch["x"]), batch) / positives(batch).clamp(min=1)

    assert error(detector(), box_mean, batch, 2, weight=positives) <= 1e-12


def test_a_batch_without_positives_divides_by_one() -> None:
    batch = {**boxes(), "y": torch.zeros(13, 8, dtype=torch.float64)}
    whole = weights.with_total(batch, positives)
    assert whole["total"] == 1
    assert weights.with_total(batch, positives, at_least=0.5)["total"] == 0.5
    assert error(detector(), per_total, whole, 4, reduction="sum") <= 1e-12


def test_batches_that_take_a_total() -> None:
    batch = boxes()
    assert weights.with_total(tuple(batch.values()), lambda batch: batch[1].sum())[3] == positives(batch)
    assert isinstance(weights.with_total(list(batch.values()), lambda _: 7), list)
    encoding = BatchEncoding(batch)
    found = weights.with_total(encoding, lambda _: 7, "boxes")
    assert type(found) is BatchEncoding
    assert found["boxes"] == 7
    assert "boxes" not in encoding
    window = Window([{name: part[k : k + 5] for name, part in batch.items()} for k in (0, 5, 10)])
    whole = weights.with_total(window, positives)
    assert [micro_batch["total"] for micro_batch in whole] == [positives(batch)] * 3
    assert error(detector(), per_total, whole, 1, weights.with_total(batch, positives), reduction="sum") <= 1e-12


def test_the_total_of_an_accumulator_in_one_process() -> None:
    model = detector()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), per_total, 4, reduction="sum")
    assert weights.with_total(boxes(), positives, over=accumulator)["total"] == positives(boxes())


@pytest.mark.parametrize("cut", ["list", None])
def test_a_total_is_no_sample(cut: Any) -> None:
    model = detector()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), cut=cut)
    samples = [X, X] if cut else [(X, X), (X, X)]
    with pytest.raises(BatchError, match=r'a list of 2 samples, and a total .* pass \{"samples": batch\}, or tuple'):
        weights.with_total(samples, lambda _: 1, over=accumulator if cut else None)
    found = weights.with_total({"samples": samples}, lambda _: 1, over=accumulator)
    assert Cutting(cut="list")(found, 1)[0][1] == {"samples": samples[1:], "total": 1}


@pytest.mark.parametrize(
    ("batch", "options", "kind", "message"),
    [
        ({"total": X}, {}, OptionError, 'the batch has a "total" already: pass another key='),
        (Named(X, X), {}, BatchError, "a total cannot be added to a Named: pass a dict, a tuple or a list"),
        (X, {}, BatchError, "a total cannot be added to a Tensor"),
        (None, {}, BatchError, "no batch to add a total to: only a rank that has no data passes None"),
    ],
)
def test_totals_that_are_refused(batch: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        weights.with_total(batch, lambda _: 1, **options)


def test_plain_class_weights_are_not_rounded_to_float32() -> None:
    x, y = torch.randn(7, 3).double(), torch.tensor([0, 1, 1, 0, 1, 1, 0])
    plain = [0.1, 0.7]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor(plain, dtype=torch.float64))

    model = nn.Linear(3, 2).double()
    assert verify(model, (x, y), loss, 2, weight=weights.class_weights(plain, 1))
    rounded = weights.class_weights(torch.tensor(plain), 1)
    assert not verify(model, (x, y), loss, 2, weight=rounded)


# --- bad input -------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no labels": (
        lambda: weights.causal_lm_tokens({"x": X, "y": X}),
        r"the batch \(a dict with 'x', 'y'\) has no \"labels\", which the weight needs: pass another key, index or "
        r"function, as in tokens\(\"y\", shift=True\)",
    ),
    "a tuple": (lambda: weights.tokens()((X, X)), r"the batch \(a tuple of 2\) has no \"labels\".*as in tokens"),
    "a tensor": (lambda: weights.tokens(1)(LABELS), r"the batch \(a Tensor\) has no item 1"),
    "short": (lambda: weights.tokens(2)((X, X)), r"the batch \(a tuple of 2\) has no item 2"),
    "None": (lambda: weights.tokens()({"labels": None}), r"has no \"labels\""),
    "no weights": (lambda: weights.sample_weights()({"x": X}), r"no \"sample_weight\".*as in sample_weights\(\"mask\""),
    "floats": (lambda: weights.tokens()({"labels": X}), r"the labels are of torch.float32, but labels that can be"),
    "a mask": (lambda: weights.tokens()({"labels": X > 0}), r"of torch.bool.*or count a mask with sample_weights"),
    "a list": (lambda: weights.tokens()({"labels": [1, 2]}), r"the labels are a list: pass a tensor"),
    "no time": (
        lambda: weights.causal_lm_tokens({"labels": LABELS[0]}),
        r"the labels have the shape \(3,\), without an axis of time",
    ),
    "label too large": (
        lambda: weights.class_weights([1.0, 2.0])({"labels": LABELS}),
        "one of the labels is 5, but there are 2 class weights, for the labels 0 to 1",
    ),
    "label below 0": (
        lambda: weights.class_weights([1.0] * 9, ignore_index=-1)({"labels": LABELS}),
        "one of the labels is -100, but there are 9 class weights.*ignore_index= if -100 should not count",
    ),
    "table of two axes": (lambda: weights.class_weights([[1.0]]), r"the class weights have the shape \(1, 1\)"),
    "empty table": (lambda: weights.class_weights([]), r"the class weights have the shape \(0,\)"),
    "negative": (lambda: weights.class_weights([1.0, -1.0]), "have a number that is negative or not finite"),
    "infinite": (lambda: weights.class_weights([1.0, torch.inf]), "have a number that is negative or not finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(WeightError, match=message) as caught:
        call()
    assert str(caught.value).count(". ") == 0  # one sentence


# --- labels that nobody counts ---------------------------------------------------------------------------

MESSAGE = r'the batch has "labels" with -100 in them but no weight was given.*bigbatch.torch.weights.causal_lm_tokens'


def labelled() -> dict[str, Tensor]:
    batch = make_batches(TOKENS)[0]
    return {"x": batch["x"], "labels": batch["y"]}


def accumulated(**options: Any) -> Accumulator:
    model = Language().double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"])[0].flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 2, **options)


@pytest.mark.parametrize("feed", [lambda batch: batch, lambda batch: Window([batch]), BatchEncoding])
def test_labels_that_nobody_counts_are_warned_of_once(feed: Any) -> None:
    accumulator = accumulated()
    with pytest.warns(BigBatchWarning, match=MESSAGE) as caught:
        accumulator.step(feed(labelled()))
        accumulator.step(feed(labelled()))
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"weight": weights.tokens()}, {"weight": lambda batch: len(batch["labels"])}]
)
def test_no_warning_if_something_counts(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulated(**options).step(labelled())


def test_no_warning_without_ignored_labels_and_only_the_first_batch_is_looked_at() -> None:
    accumulator, batch = accumulated(), labelled()
    whole = {**batch, "labels": batch["labels"].clamp(min=0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.step(whole)
        accumulator.step(batch)
