"""What a loss may return, and its aux: that of the whole batch, however it is cut."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BatchError, BigBatchError, BigBatchWarning, Interrupted, LossError, OptionError, StateError, Window
from bigbatch.core.checkpoint.serialize import from_bytes, to_bytes
from bigbatch.torch import Accumulator, train_with_accumulation, verify
from bigbatch.torch import batch as nest
from bigbatch.torch.arrays import from_array, to_array
from tests import problems
from tests.problems import IGNORED

from .training import Batch, Classifier, Language, flat

N = 13


class Scores(NamedTuple):
    margin: Tensor
    hits: Tensor


def digits(size: int = N) -> Batch:
    return {name: torch.as_tensor(array) for name, array in problems.samples(size)[0].items()}


def texts(*lengths: int) -> Batch:
    return {name: torch.as_tensor(array) for name, array in problems.tokens(*lengths).items()}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().double()


def of_digits(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    logits = model(batch["x"])
    hit = logits.argmax(-1) == batch["y"]
    aux = {
        "accuracy": hit.double().mean(),
        "correct": hit.sum(),
        "logits": logits,
        "scores": Scores(logits.amax(-1).mean(), hit),
        "sizes": [len(hit), float(len(hit)), None],
    }
    return F.cross_entropy(logits, batch["y"]), aux


def of_tokens(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    logits, _ = model(batch["x"])
    flat_logits, y = logits.flatten(0, 1), batch["y"].flatten()
    loss = F.cross_entropy(flat_logits, y, ignore_index=IGNORED)
    counted = y != IGNORED
    in_top = (flat_logits.topk(32).indices == y[:, None]).any(-1)
    accuracy = in_top[counted].double().mean()  # of no token: NaN
    return loss, {"accuracy": accuracy, "tokens": counted.sum(), "last": logits[:, -1]}


def num_tokens(batch: Batch) -> Tensor:
    return (batch["y"] != IGNORED).sum()


def made(model: nn.Module, loss: Any, size: int | None = 4, **options: Any) -> Accumulator:
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, size, **{"has_aux": True, **options})


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)
    else:
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


def by_micro_batch(accumulator: Accumulator, batch: Batch, size: int, weight: Any = None) -> Any:
    accumulator.accumulation_steps = 100
    for part in nest.cut(batch, size)[0]:
        with accumulator.micro_batch(weight=len(part["y"]) if weight is None else weight(part)) as micro:
            micro.backward(accumulator.loss(accumulator.model, part))
    return accumulator.flush()


# --- against the full batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
@pytest.mark.parametrize("size", [1, 2, 3, N - 1, N])
def test_aux_is_that_of_the_full_batch(size: int, way: str) -> None:
    batch, model = digits(), classifier()
    loss, expected = of_digits(model, batch)
    aux: Any = "auto"
    if way == "micro_batch":  # how many samples one has is not known there
        numbers: dict[str, Any] = {"accuracy": "auto", "correct": "auto", "sizes": "auto"}
        aux = {**numbers, "logits": "concatenate", "scores": Scores("auto", "concatenate")}
    accumulator = made(model, of_digits, size, aux=aux)
    if way == "batch":
        step = accumulator.step(batch)
    elif way == "window":
        step = accumulator.step(Window(nest.cut(batch, size)[0]))
    else:
        step = by_micro_batch(accumulator, batch, size)
    num = -(-N // size)
    assert step.loss == pytest.approx(loss.item(), rel=1e-12)
    assert_same(step.aux["accuracy"], expected["accuracy"].item())
    assert type(step.aux["accuracy"]) is float
    assert step.aux["correct"] == expected["correct"].item()
    assert type(step.aux["correct"]) is int
    assert_same(step.aux["logits"], expected["logits"])
    assert not step.aux["logits"].requires_grad
    assert type(step.aux["scores"]) is Scores
    assert_same(step.aux["scores"].margin, expected["scores"].margin.item())
    assert torch.equal(step.aux["scores"].hits, expected["scores"].hits)
    assert step.aux["sizes"][0] == N
    assert step.aux["sizes"][2] is None
    assert step.metrics == pytest.approx(
        {
            "accuracy": expected["accuracy"].item(),
            "correct": expected["correct"].item(),
            "scores.margin": expected["scores"].margin.item(),
            "sizes.0": N,
            "sizes.1": sum(len(part["y"]) ** 2 for part in nest.cut(batch, size)[0]) / N,
        },
        rel=1e-12,
    )
    assert step.summed == ("correct", "sizes.0")
    assert step.num_micro_batches == num


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
@pytest.mark.parametrize("lengths", [(3, 60, 17, 40), (3, 60, 0, 40, 21), (0, 0, 5)])
def test_tokens_count_and_rows_of_a_micro_batch_without_tokens_are_there(lengths: Any, way: str) -> None:
    batch = texts(*lengths)
    torch.manual_seed(0)
    model = Language().double()
    plain = copy.deepcopy(model)
    loss, expected = of_tokens(plain, batch)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    aux = {"accuracy": "mean", "tokens": "sum", "last": "concatenate"} if way == "micro_batch" else "auto"
    accumulator = made(model, of_tokens, 1, weight=num_tokens, aux=aux)
    if way == "micro_batch":
        step = by_micro_batch(accumulator, batch, 1, num_tokens)
    else:
        step = accumulator.step(batch if way == "batch" else Window(nest.cut(batch, 1)[0]))
    assert step.loss == pytest.approx(loss.item(), rel=1e-12)
    assert_same(step.metrics["accuracy"], expected["accuracy"].item())
    assert step.metrics["tokens"] == sum(lengths)
    assert_same(step.aux["last"], expected["last"])
    assert float((flat(model) - flat(plain)).norm() / flat(plain).norm()) <= 1e-12
    naive = np.nanmean([of_tokens(plain, part)[1]["accuracy"] for part in nest.cut(batch, 1)[0]])
    if sum(map(bool, lengths)) > 1:  # negative control: the mean of means
        assert abs(naive - expected["accuracy"].item()) > 1e-3


def test_negative_control_a_mean_of_means_differs() -> None:
    batch, model = digits(), classifier()
    expected = of_digits(model, batch)[1]["scores"].margin.item()
    margins = [of_digits(model, part)[1]["scores"].margin.item() for part in nest.cut(batch, 4)[0]]
    assert abs(sum(margins) / len(margins) - expected) > 1e-3
    assert made(model, of_digits).step(batch).metrics["scores.margin"] == pytest.approx(expected, rel=1e-12)


def test_a_batch_without_weight_has_rows_but_no_mean() -> None:
    torch.manual_seed(0)
    step = made(Language().double(), of_tokens, 1, weight=lambda batch: 0).step(texts(5, 3, 4))
    assert not step.is_applied
    assert math.isnan(step.metrics["accuracy"])
    assert step.metrics["tokens"] == 12
    assert len(step.aux["last"]) == 3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_terms_and_aux(reduction: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        (tokens, aux), length = of_tokens(model, batch), model(batch["x"])[1]
        return (tokens, F.mse_loss(length, batch["z"])), aux

    torch.manual_seed(0)
    model, batch = Language().double(), texts(3, 60, 17, 40, 5)
    expected = loss(model, batch)[1]
    step = made(model, loss, 2, weight=lambda batch: (num_tokens(batch), len(batch["y"])), reduction=reduction).step(
        batch
    )
    assert_same(step.metrics["accuracy"], expected["accuracy"].item())  # counts like the first term
    assert_same(step.aux["last"], expected["last"])


# --- the words -----------------------------------------------------------------------------------------------


def confusion(model: nn.Module, batch: Batch) -> Any:
    logits = model(batch["x"])
    matrix = torch.zeros(10, 10, dtype=torch.int64)
    matrix.index_put_((batch["y"], logits.argmax(-1)), torch.tensor(1), accumulate=True)
    return F.cross_entropy(logits, batch["y"]), matrix


@pytest.mark.parametrize("size", [2, 5, 10, N])
def test_tensors_are_added_or_averaged_value_by_value(size: int) -> None:
    model, batch = classifier(), digits()
    expected = confusion(model, batch)[1]
    step = made(model, confusion, size, aux="sum").step(batch)
    assert torch.equal(step.aux, expected)
    assert step.metrics == {}
    assert step.summed == ()

    def centre(model: nn.Module, batch: Batch) -> Any:
        logits = model(batch["x"])
        return F.cross_entropy(logits, batch["y"]), logits.mean(0)

    expected = centre(model, batch)[1]
    assert_same(made(model, centre, size, aux="mean").step(batch).aux, expected)


@pytest.mark.parametrize("size", [5, 10])
def test_a_tensor_that_is_taken_for_rows_by_accident_is_noticed(size: int) -> None:
    """Ten classes, ten samples in a micro-batch: the last one has three."""
    with pytest.raises(OptionError, match=r"aux has the shape \(10, 10\) for . samples"):
        made(classifier(), confusion, size).step(digits())


def test_low_precision_is_averaged_in_float32() -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        x = model(batch["x"])
        return F.cross_entropy(x, batch["y"]), (torch.full((2,), 1.0 + 2**-7).bfloat16(), torch.tensor(0.1).half())

    step = made(classifier(), loss, 1, aux="mean").step(digits())
    assert step.aux[0].dtype == torch.bfloat16
    assert step.aux[0].tolist() == [1.0 + 2**-7] * 2
    assert step.aux[1] == pytest.approx(float(torch.tensor(0.1).half()), rel=1e-12)


def test_functions_get_the_values_and_the_weights() -> None:
    seen: list[Any] = []

    def largest(values: list[Any], weights: list[Any]) -> Any:
        seen.append((values, weights))
        return max(values)

    def auc(values: list[Tensor], weights: list[Any]) -> Any:
        return {"mean": torch.cat(values).mean(), "rows": torch.cat(values)}

    def loss(model: nn.Module, batch: Batch) -> Any:
        value, aux = of_digits(model, batch)
        return value, (aux["accuracy"], aux["logits"], "text")

    model, batch = classifier(), digits()
    expected = of_digits(model, batch)[1]["logits"]
    step = made(model, loss, aux=(largest, auc, lambda values, weights: "".join(values))).step(batch)
    ((values, weights),) = seen
    assert len(values) == 4
    assert weights == [4, 4, 4, 1]
    assert step.metrics == {"0": max(values), "1.mean": pytest.approx(expected.mean().item(), rel=1e-12)}
    assert_same(step.aux[1]["rows"], expected)
    assert step.aux[2] == "text" * 4


def test_words_by_name_and_bools_that_are_counted() -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        value, aux = of_digits(model, batch)
        return {"loss": value, "good": aux["accuracy"] > 0.1, "share": aux["correct"], "all": True}

    model, batch = classifier(), digits()
    parts = [of_digits(model, part)[1] for part in nest.cut(batch, 4)[0]]
    step = made(model, loss, aux={"good": "sum", "share": "mean", "all": "mean"}).step(batch)
    assert step.metrics["good"] == sum(part["accuracy"].item() > 0.1 for part in parts)
    weighted = sum(part["correct"].item() * len(part["logits"]) for part in parts) / N
    assert step.metrics["share"] == pytest.approx(weighted, rel=1e-12)
    assert step.metrics["all"] == pytest.approx(1.0, rel=1e-12)
    assert step.summed == ("good",)


def test_a_function_that_fails_changes_nothing() -> None:
    model = classifier()
    before = flat(model)
    with pytest.raises(ZeroDivisionError):
        made(model, lambda model, batch: (of_digits(model, batch)[0], 1), aux=lambda values, weights: 1 / 0).step(
            digits()
        )
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        ("average", 'aux="average" is unknown|aux=.average. is unknown'),
        ({"accuracy": 3}, "aux=3 is unknown"),
    ],
)
def test_unknown_words_are_refused(aux: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        made(classifier(), of_digits, aux=aux)
    with pytest.raises(OptionError, match="pass has_aux=True too"):
        made(classifier(), of_digits, has_aux=False, aux="sum")


def test_the_options_are_fixed() -> None:
    accumulator = made(classifier(), of_digits)
    assert accumulator.has_aux
    assert accumulator.aux == "auto"
    with pytest.raises(OptionError, match="has_aux cannot be changed"):
        accumulator.has_aux = False


# --- what is refused -----------------------------------------------------------------------------------------


def returning(change: Callable[[Tensor, Tensor, int], Any]) -> Callable[[nn.Module, Batch], Any]:
    numbers = iter(range(100))

    def loss(model: nn.Module, batch: Batch) -> Any:
        logits = model(batch["x"])
        return change(F.cross_entropy(logits, batch["y"]), logits, next(numbers))

    return loss


class Opaque:
    pass


BAD = {
    "no pair": (True, lambda loss, out, k: loss, "the pair \\(loss, aux\\), but it returned a Tensor"),
    "three": (True, lambda loss, out, k: (loss, out, out), "it returned a tuple of 3"),
    "logits without has_aux": (False, lambda loss, out, k: (loss, out), r"has the shape \(4, 10\).*has_aux=True"),
    "return_dict=False": (False, lambda loss, out, k: (loss, out, (out,)), "has_aux=True"),
    "dict without has_aux": (False, lambda loss, out, k: (loss, {"a": out}), "is a dict.*has_aux=True"),
    "scalar without has_aux": (False, lambda loss, out, k: (loss, loss), "2 terms but the weight has 1.*has_aux=True"),
    "no loss": (False, lambda loss, out, k: {"logits": out}, r'without "loss" \(it has logits\)'),
    "loss is None": (False, lambda loss, out, k: {"loss": None, "logits": out}, "pass labels to the model"),
    "unreduced": (True, lambda loss, out, k: (out, loss.item()), "instead of 1"),
    "bool": (True, lambda loss, out, k: (loss, {"ok": loss < 3}), r"aux\['ok'\] is true or false"),
    "object": (True, lambda loss, out, k: (loss, [Opaque()]), r"aux\[0\] is of type Opaque"),
    "text": (True, lambda loss, out, k: (loss, "text"), "aux is of type str"),
    "complex": (True, lambda loss, out, k: (loss, torch.tensor(1j)), "aux is of type complex Tensor"),
    "no rows": (True, lambda loss, out, k: (loss, out[:1]), r"the shape \(1, 10\) for 4 samples"),
    "flattened": (True, lambda loss, out, k: (loss, out.flatten()), r"the shape \(40,\) for 4 samples"),
    "another name": (True, lambda loss, out, k: (loss, {f"a{k}": loss}), r"aux\['a0'\] for one micro-batch and aux"),
    "another width": (
        True,
        lambda loss, out, k: (loss, out[:, : 3 + k]),
        r"a tensor of shape \(4, 3\) with floating-point numbers for one micro-batch and .* \(4, 4\) with",
    ),
    "another kind": (
        True,
        lambda loss, out, k: (loss, k / 2 if k else 0),
        "is one integer .* and one floating-point number",
    ),
    "None first": (True, lambda loss, out, k: (loss, k or None), "is None .* and one integer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_losses_are_refused_and_change_nothing(name: str) -> None:
    has_aux, change, message = BAD[name]
    model = classifier()
    before = flat(model)
    accumulator = made(model, returning(change), has_aux=has_aux)
    with pytest.raises((LossError, OptionError), match=message):
        accumulator.step(digits())
    assert torch.equal(flat(model), before)
    accumulator.loss = of_digits if has_aux else lambda model, batch: of_digits(model, batch)[0]
    assert accumulator.step(digits()).is_applied


def test_squeeze_on_a_single_sample_is_named() -> None:
    accumulator = made(
        nn.Linear(64, 1).double(), lambda model, batch: (model(batch["x"]).mean(), model(batch["x"]).squeeze()), 4
    )
    with pytest.raises(LossError, match=r"\(4,\) .* and one floating-point number for another.*squeeze\(-1\) does not"):
        accumulator.step(digits())  # 13 samples


def test_a_second_number_that_is_not_trained_is_warned_of_once() -> None:
    model = classifier()
    accumulator = made(model, lambda model, batch: (of_digits(model, batch)[0], model(batch["x"]).square().mean()))
    with pytest.warns(BigBatchWarning, match=r"not trained: return \(\(loss, penalty\), aux\) to train both") as found:
        accumulator.step(digits())
    assert len(found) == 1
    accumulator.step(digits())  # warnings are errors
    made(model, lambda model, batch: (of_digits(model, batch)[0], model(batch["x"]).mean().detach())).step(digits())


def test_two_metrics_of_one_name_are_refused() -> None:
    loss = returning(lambda loss, out, k: (loss, {"a.b": 1.0, "a": {"b": 2.0}}))
    with pytest.raises(OptionError, match=r"aux\['a.b'\] and aux\['a'\]\['b'\] would both be the metric \"a.b\""):
        made(classifier(), loss).step(digits())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_in_low_precision_is_kept_in_a_wider_dtype(dtype: torch.dtype) -> None:
    count = torch.tensor([301.0, 1.0], dtype=dtype)  # 301 * 250 is infinite in float16 and rounded in bfloat16

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        return of_digits(model, batch)[0], {"sum": count, "mean": count}

    aux = made(classifier(), loss, 1, aux={"sum": "sum", "mean": "mean"}).step(digits(250)).aux
    assert aux["sum"].dtype == torch.float32
    assert aux["sum"].tolist() == [250 * count[0].item(), 250]
    assert aux["mean"].dtype == dtype


def test_a_mean_over_micro_batches_needs_a_weight_with_reduction_sum() -> None:
    def of_sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return each.sum(), {"mean": each.mean(), "n": len(each)}

    batch, model = digits(), classifier()
    accumulator = made(model, of_sums, reduction="sum", accumulation_steps=100)

    def feed(*weights: Any) -> Any:
        for part, weight in zip((slice(0, 12), slice(12, 13)), weights, strict=True):
            with accumulator.micro_batch(weight) as micro:
                micro.backward(of_sums(model, {name: tensor[part] for name, tensor in batch.items()}))
        return accumulator.flush()

    with pytest.raises(
        OptionError, match=r"aux\['mean'\] becomes a mean .*: pass micro_batch\(weight=len\(y\)\)"
    ) as found:
        feed(None, None)
    assert not hasattr(found.value, "__notes__")  # nothing was added
    assert accumulator.num_fed == 0
    expected = of_sums(model, batch)[1]["mean"].item()
    assert_same(feed(12, 1).aux["mean"], expected)


def test_in_micro_batch_the_number_of_samples_is_not_known() -> None:
    with pytest.raises(OptionError, match=r"for an unknown number of samples.*aux=\"concatenate\""):
        by_micro_batch(made(classifier(), of_digits), digits(), 4)


# --- memory --------------------------------------------------------------------------------------------------


def test_aux_keeps_no_graph_and_is_not_changed_later() -> None:
    """A view of the batch, of a parameter and of a buffer: what they hold afterwards does not show."""
    model = classifier()
    model.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def loss(model: Any, batch: Batch) -> Any:
        model.count += 1
        hidden = model[0](batch["x"])
        first = hidden[:, :1]
        return F.cross_entropy(model(batch["x"]), batch["y"]), {
            "x": batch["x"][:, 0], "count": model.count, "first": first, "bias": model[2].bias.sum(),
        }  # fmt: skip

    batch = digits()
    before, bias = batch["x"][:, 0].clone(), model[2].bias.sum().item()
    expected = model[0](batch["x"])[:, :1]
    step = made(model, loss).step(batch)
    batch["x"].zero_()
    assert torch.equal(step.aux["x"], before)
    assert step.aux["count"] == pytest.approx((1 * 4 + 2 * 4 + 3 * 4 + 4) / N, rel=1e-12)
    assert step.aux["bias"] == pytest.approx(bias, rel=1e-12)
    assert_same(step.aux["first"], expected)
    for tensor in (step.aux["x"], step.aux["first"]):
        assert tensor.grad_fn is None
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_history_keeps_metrics_and_no_rows() -> None:
    model = classifier()
    batches = [digits(13), digits(7)]
    history = train_with_accumulation(
        model,
        batches,
        torch.optim.SGD(model.parameters(), lr=0.0),
        of_digits,
        epochs=2,
        micro_batch_size=4,
        has_aux=True,
    )
    assert all(step.aux is None for step in history)
    auxes = [of_digits(model, batch)[1] for batch in batches]
    accuracy = sum(aux["correct"].item() for aux in auxes) / 20
    assert history.metrics["accuracy"] == pytest.approx([accuracy] * 2, rel=1e-12)
    assert history.metrics["correct"] == [sum(aux["correct"].item() for aux in auxes)] * 2


def test_an_unread_metric_keeps_no_rows_alive() -> None:
    import gc
    import weakref

    alive: list[weakref.ref[Any]] = []
    clone = Tensor.clone

    def watched(tensor: Tensor) -> Tensor:
        found = clone(tensor)
        alive.append(weakref.ref(found))
        return found

    model = classifier()
    accumulator = made(model, of_digits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "clone", watched)
        kept = accumulator.step(digits()).without_aux()
    gc.collect()
    assert len(alive) > 4
    assert not [ref for ref in alive if ref() is not None and ref().ndim]
    assert kept.metrics["correct"] >= 0


# --- a window that is interrupted or saved ------------------------------------------------------------------------


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_checkpoint(state: Any) -> Any:
    return from_bytes(to_bytes(state, to_array), from_array)


@pytest.mark.parametrize("saved", [None, through_torch, through_checkpoint])
def test_an_interrupted_step_keeps_its_aux(saved: Any) -> None:
    batch, model = digits(), classifier()
    expected = made(copy.deepcopy(model), of_digits).step(batch)

    def interrupting(model: nn.Module, batch: Batch) -> Any:
        if saved is None or len(calls) < 2:
            accumulator.interrupt()
        calls.append(0)
        return of_digits(model, batch)

    calls: list[int] = []
    accumulator = made(model, interrupting)
    for _ in range(2):
        with pytest.raises(Interrupted):
            accumulator.step(batch)
    if saved is None:
        accumulator.loss = of_digits
    else:
        state = saved(accumulator.state_dict())
        accumulator = made(model, of_digits)
        accumulator.load_state_dict(state)
    step = accumulator.step(batch)
    assert step.metrics == expected.metrics
    assert torch.equal(step.aux["logits"], expected.aux["logits"])
    assert type(step.aux["scores"]) is (Scores if saved is None else dict)


def test_an_open_window_is_saved_with_its_aux() -> None:
    batch, model = digits(), classifier()
    aux = {"a": ["mean", "concatenate"]}

    def loss(model: nn.Module, batch: Batch) -> Any:
        value, found = of_digits(model, batch)
        return value, {"a": [found["accuracy"], found["logits"]]}

    expected = loss(model, batch)[1]["a"]
    accumulator = made(model, loss, None, accumulation_steps=100, aux=aux)
    for part in nest.cut(batch, 4)[0]:
        with accumulator.micro_batch(weight=len(part["y"])) as micro:
            micro.backward(loss(model, part))
    state = through_torch(accumulator.state_dict())
    with pytest.raises(StateError, match="saved with has_aux=True, this accumulator has has_aux=False"):
        made(model, loss, None, has_aux=False).load_state_dict(state)
    other = made(model, loss, None, accumulation_steps=100, aux=aux)
    other.load_state_dict(state)
    step = other.flush()
    assert step is not None
    assert_same(step.aux["a"][0], expected[0].item())
    assert_same(step.aux["a"][1], expected[1])


def test_an_older_state_has_no_aux() -> None:
    accumulator = made(classifier(), None, None, accumulation_steps=100, has_aux=False)
    with accumulator.micro_batch(weight=N) as micro:
        micro.backward(of_digits(accumulator.model, digits())[0])
    state = accumulator.state_dict()
    del state["window"]["aux"]
    other = made(copy.deepcopy(accumulator.model), None, None, has_aux=False)
    other.load_state_dict(state)
    assert other.flush() is not None


def test_a_step_that_failed_leaves_no_aux_behind() -> None:
    model = classifier()
    accumulator = made(model, of_digits)
    with pytest.raises(BatchError):
        accumulator.step({"x": torch.zeros(3, 64), "y": torch.zeros(2)})
    fails = returning(lambda loss, out, k: (loss, out) if k < 2 else 1 / 0)
    accumulator.loss = fails
    with pytest.raises(ZeroDivisionError):
        accumulator.step(digits())
    accumulator.loss = of_digits
    assert len(accumulator.step(digits()).aux["logits"]) == N


# --- losses that return mappings -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_mapping_with_the_loss(has_aux: bool, way: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        value, aux = of_digits(model, batch)
        return {"loss": value, "accuracy": aux["accuracy"]}

    model, batch = classifier(), digits()
    expected, aux = of_digits(model, batch)
    accumulator = made(model, loss, has_aux=has_aux)
    step = accumulator.step(batch) if way == "batch" else by_micro_batch(accumulator, batch, 4)
    assert step.loss == pytest.approx(expected.item(), rel=1e-12)
    assert step.metrics == (pytest.approx({"accuracy": aux["accuracy"].item()}, rel=1e-12) if has_aux else {})
    assert (step.aux is None) != has_aux


def gpt2(**options: Any) -> tuple[nn.Module, Batch]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **options,
    )
    model = transformers.GPT2LMHeadModel(config).double()
    ids = torch.randint(1, 64, (7, 12))
    lengths = torch.tensor([12, 3, 7, 1, 12, 5, 2])
    mask = (torch.arange(12) < lengths[:, None]).long()
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), torch.tensor(IGNORED))}


def shifted(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("name", ["output, its loss only", "output", "pair", "return_dict=False"])
def test_hugging_face_with_padded_batches(name: str, size: int) -> None:
    """At size 1 a micro-batch has no token: its loss is 0/0, and its logits are there."""
    model, batch = gpt2(use_cache=False)
    plain = copy.deepcopy(model)
    output = plain(**batch)
    output.loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    losses = {
        "output, its loss only": lambda model, batch: model(**batch),
        "output": lambda model, batch: model(**batch),
        "pair": lambda model, batch: ((out := model(**batch)), {"logits": out.logits}),
        "return_dict=False": lambda model, batch: model(**batch, return_dict=False),
    }
    has_aux = name != "output, its loss only"
    step = made(model, losses[name], size, weight=shifted, has_aux=has_aux).step(batch)
    tolerance = 1e-6  # its loss is computed in float32
    assert step.loss == pytest.approx(output.loss.item(), rel=tolerance)
    assert float((flat(model) - flat(plain)).norm() / flat(plain).norm()) <= tolerance
    if has_aux:
        logits = step.aux if name == "return_dict=False" else step.aux["logits"]
        assert_same(logits, output.logits)


def test_hugging_face_without_labels() -> None:
    model, batch = gpt2(use_cache=False)
    del batch["labels"]
    with pytest.raises(LossError, match=r"the output has no loss \(it has logits\): pass labels to the model"):
        made(model, lambda model, batch: model(**batch), has_aux=False).step(batch)


def test_hugging_face_return_dict_false_without_has_aux() -> None:
    model, batch = gpt2(use_cache=False)
    with pytest.raises(LossError, match=r"item 2 of 2 .* the shape \(4, 12, 64\).*has_aux=True"):
        made(model, lambda model, batch: model(**batch, return_dict=False), has_aux=False, weight=shifted).step(batch)


def test_hugging_face_caches_are_refused_by_name() -> None:
    model, batch = gpt2()
    with pytest.raises(BigBatchError, match=r"aux\['past_key_values'\] is of type DynamicCache"):
        made(model, lambda model, batch: model(**batch), weight=shifted).step(batch)


# --- with other options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["batch", "window"])
def test_time_major_batches_have_rows_by_sample(way: str) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4).double()
    x, y = torch.randn(5, 7, 3, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)

    def loss(model: nn.Module, batch: Any) -> Any:
        outputs, _ = model(batch[0])
        return F.mse_loss(outputs[-1], batch[1]), {"last": outputs[-1], "error": (outputs[-1] - batch[1]).abs().mean()}

    expected = loss(model, (x, y))[1]
    accumulator = made(model, loss, 3, batch_axis=(1, 0), weight=lambda batch: len(batch[1]))
    cut = Window((x[:, k : k + 3], y[k : k + 3]) for k in (0, 3, 6))
    step = accumulator.step((x, y) if way == "batch" else cut)
    assert_same(step.aux["last"], expected["last"])
    assert_same(step.metrics["error"], expected["error"].item())
    accumulator.loss = lambda model, batch: (loss(model, batch)[0], model(batch[0])[0])
    with pytest.raises(OptionError, match=r"the shape \(5, 3, 4\) for 3 samples.*along its leading axis"):
        accumulator.step((x, y))


def test_lists_of_samples_have_rows() -> None:
    def loss(model: nn.Module, samples: Any) -> Any:
        return of_digits(model, {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")})

    model, batch = classifier(), digits()
    samples = [{"x": x, "y": y} for x, y in zip(batch["x"], batch["y"], strict=True)]
    expected = of_digits(model, batch)[1]["logits"]
    assert_same(made(model, loss, cut="list").step(samples).aux["logits"], expected)


def test_a_skipped_micro_batch_has_no_aux() -> None:
    model, batch = classifier(), digits()
    accumulator = made(model, of_digits, accumulation_steps=4, aux="mean")
    accumulator.loss = lambda model, batch: (of_digits(model, batch)[0], of_digits(model, batch)[1]["accuracy"])
    parts = nest.cut(batch, 4)[0]
    for k, part in enumerate([parts[0], parts[1], parts[2], parts[3], parts[3]]):
        with accumulator.micro_batch(weight=len(part["y"])) as micro:
            if k == 1:
                micro.skip()
            else:
                micro.backward(accumulator.loss(model, part))
    step = accumulator.flush() or micro.step
    assert step is not None
    assert step.weight == 10


def test_backward_returns_aux_too() -> None:
    model, batch = classifier(), digits()
    expected = of_digits(model, batch)[1]
    step = made(model, of_digits).backward(batch)
    assert not step.is_applied
    assert_same(step.metrics["accuracy"], expected["accuracy"].item())
    assert_same(step.aux["logits"], expected["logits"])


def test_an_accumulator_verifies_its_own_loss() -> None:
    assert made(classifier(), of_digits).verify(digits()).is_exact


def test_batch_norm_counts_micro_batches_without_weight_as_the_full_batch_does() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batch = digits()
    models[0](batch["x"])
    accumulator = made(models[1], of_digits, weight=lambda part: float((part["y"] > 3).sum()))
    with pytest.warns(UserWarning, match="BatchNorm"):
        accumulator.step(batch)
    assert_same(models[1][0].running_var, models[0][0].running_var)
    assert_same(models[1][0].running_mean, models[0][0].running_mean)


# --- verify --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "has_aux"),
    [
        (of_digits, True),
        (lambda model, batch: {"loss": of_digits(model, batch)[0]}, False),
        (lambda model, batch: {"loss": of_digits(model, batch)[0], "text": "any"}, True),
    ],
)
def test_verify_takes_the_same_losses(loss: Any, has_aux: bool) -> None:
    found = verify(classifier(), digits(), loss, 4, has_aux=has_aux)
    assert found.is_exact
    assert not verify(classifier(), digits(), loss, 4, has_aux=has_aux, weight=lambda batch: 1).is_exact


def test_verify_says_has_aux() -> None:
    with pytest.raises(LossError, match="has_aux=True"):
        verify(classifier(), digits(), lambda model, batch: (of_digits(model, batch)[0], model(batch["x"])), 4)
