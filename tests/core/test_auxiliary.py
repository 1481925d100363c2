"""How the aux of micro-batches becomes that of the batch: the part without a framework."""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from bigbatch import LossError, OptionError
from bigbatch.core import auxiliary
from bigbatch.core.auxiliary import Kind, flattened, rebuilt, way_of, words_for
from bigbatch.core.loss_result import split
from bigbatch.core.weight import shares


class Scores(NamedTuple):
    f1: float
    hits: int


@dataclass
class Output:
    logits: Any
    scores: Any = None


AUX = {"a": 1, "b": [2.0, (3, None)], "c": Scores(0.5, 4), "d": Output(5, {"x": 6}), "e": OrderedDict(f=7)}


def test_nests_are_flattened_and_rebuilt_with_their_classes() -> None:
    leaves = flattened(AUX)
    assert list(leaves.values()) == [1, 2.0, 3, None, 0.5, 4, 5, 6, 7]
    again = rebuilt(AUX, {path: leaf and leaf * 10 for path, leaf in leaves.items()})
    assert again == {
        "a": 10, "b": [20.0, (30, None)], "c": Scores(5.0, 40), "d": Output(50, {"x": 60}), "e": OrderedDict(f=70),
    }  # fmt: skip
    assert [*map(type, again.values())] == [*map(type, AUX.values())]
    assert flattened(auxiliary.plain(AUX)) == leaves
    assert flattened(3) == {(): 3} == flattened(rebuilt(4, {(): 3}))
    assert flattened({}) == {}
    assert rebuilt({}, {}) == {}


def test_metrics_have_dotted_names() -> None:
    assert auxiliary.metrics({**AUX, "rows": [[], object()]}) == {
        "a": 1, "b.0": 2, "b.1.0": 3, "c.f1": 0.5, "c.hits": 4, "d.logits": 5, "d.scores.x": 6, "e.f": 7,
    }  # fmt: skip
    assert auxiliary.metrics(0.25) == {"aux": 0.25}
    assert auxiliary.metrics((1, 2)) == {"0": 1, "1": 2}


def test_a_word_counts_for_everything_below_it() -> None:
    aux = {"a": 1, "b": [2, 3]}
    assert words_for("sum", aux) == {("a",): "sum", ("b", 0): "sum", ("b", 1): "sum"}
    assert words_for({"a": "auto", "b": "sum"}, aux) == {("a",): "auto", ("b", 0): "sum", ("b", 1): "sum"}
    assert words_for({"a": max, "b": ["sum", "mean"]}, aux)["b", 1] == "mean"
    assert words_for("auto", ()) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"a": "sum"}, r"does not say how to combine aux\['b'\]\[0\]: name every part"),
        ({"a": "sum", "b": "sum", "c": "sum"}, r"combine aux\['c'\], which the loss does not return: .*aux\['a'\]"),
        ({"a": "sum", "b": ["sum"]}, r"does not say how to combine aux\['b'\]\[1\]"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        words_for(words, {"a": 1, "b": [2, 3]})


@pytest.mark.parametrize("words", ["avg", {"a": "Mean"}, None, 3])
def test_unknown_words_are_refused(words: Any) -> None:
    with pytest.raises(OptionError, match=r'aux=.* is unknown: pass "auto", "mean", "sum" or "concatenate"'):
        auxiliary.check_aux("aux", words)


FLOAT, INTEGER, BOOL = (Kind((), kind, "Tensor") for kind in ("float", "integer", "bool"))
ROWS = Kind((4, 2), "float", "Tensor")


@pytest.mark.parametrize(
    ("kind", "word", "way"),
    [
        (FLOAT, "auto", "mean"),
        (INTEGER, "auto", "sum"),
        (ROWS, "auto", "concatenate"),
        (BOOL, "sum", "sum"),
        (ROWS, "sum", "sum"),
        (INTEGER, "mean", "mean"),
        (BOOL, max, max),
        (Kind((), "none", "NoneType"), "auto", "keep"),
        (Kind((), "other", "str"), max, max),
    ],
)
def test_ways(kind: Kind, word: Any, way: Any) -> None:
    assert way_of(("a",), kind, word, 4) == way


@pytest.mark.parametrize(
    ("kind", "word", "num_samples", "message"),
    [
        (BOOL, "auto", 4, "true or false for each micro-batch"),
        (FLOAT, "concatenate", 4, "no row for each sample"),
        (ROWS, "auto", 8, r"aux\['a'\] has the shape \(4, 2\) for 8 samples"),
        (ROWS, "auto", None, "for an unknown number of samples"),
        (Kind((), "other", "str"), "mean", 4, r"aux\['a'\] is of type str, which cannot be combined"),
    ],
)
def test_leaves_that_cannot_be_combined_are_refused(kind: Kind, word: str, num_samples: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        way_of(("a",), kind, word, num_samples)


def test_the_mean_is_weighted_and_a_mean_over_nothing_is_left_out() -> None:
    weights = [(3,), (60,), (0,), (40,)]
    by = [s for (s,) in (shares(weight, (103,)) for weight in weights)]
    assert auxiliary.mean([1.0, 0.5, math.nan, 0.25], by) == pytest.approx((3 + 30 + 10) / 103, rel=1e-15)


def test_summed_names_are_those_of_numbers() -> None:
    ways = {("a",): "sum", ("b", 0): "mean", ("c",): "sum"}
    assert auxiliary.summed(ways, {("a",): INTEGER, ("b", 0): FLOAT, ("c",): ROWS}) == ("a",)


def test_another_structure_is_refused() -> None:
    with pytest.raises(LossError, match=r"aux\['a'\] for one micro-batch and aux\['a'\], aux\['b'\] for another"):
        auxiliary.check_same(flattened({"a": 1}), flattened({"a": 1, "b": 2}))


# --- what a loss returned; a float stands for a scalar, a list for a tensor with axes ---------------------------------


class ModelOutput(OrderedDict):  # a Hugging Face output leaves out what is None
    loss = None


def shape_of(value: Any) -> Any:
    return () if isinstance(value, float) else (len(value),) if isinstance(value, list) else None


@pytest.mark.parametrize(
    ("returned", "terms"),
    [
        (0.5, (0.5,)),
        ((0.5, 0.25), (0.5, 0.25)),
        ({"loss": 0.5, "logits": [1, 2]}, (0.5,)),
        ({"loss": (0.5, 0.25)}, (0.5, 0.25)),
        (ModelOutput(loss=0.5), (0.5,)),
    ],
)
@pytest.mark.parametrize("has_aux", [False, True])
def test_losses_that_are_understood(returned: Any, terms: Any, has_aux: bool) -> None:
    assert split((returned, "aux") if has_aux else returned, len(terms), has_aux=has_aux, shape_of=shape_of) == (
        terms,
        "aux" if has_aux else None,
    )


def test_the_rest_of_a_mapping_is_aux() -> None:
    found = split({"loss": 0.5, "hits": 3, "f1": 0.25}, 1, has_aux=True, shape_of=shape_of)
    assert found == ((0.5,), {"hits": 3, "f1": 0.25})


@pytest.mark.parametrize(
    ("returned", "has_aux", "message"),
    [
        ((0.5, [1, 2]), False, r"item 2 of 2 that the loss returned has the shape \(2,\).*has_aux=True"),
        ((0.5, {"a": 1}), False, "item 2 of 2 that the loss returned is a dict.*has_aux=True"),
        ((0.5, 0.25), False, "the loss has 2 terms but the weight has 1: .*has_aux=True"),
        (ModelOutput(logits=[1]), False, r"the output has no loss \(it has logits\): pass labels to the model"),
        (ModelOutput(logits=[1]), True, "the output has no loss"),
        ({"loss": None}, False, "the output has no loss"),
        ({"Loss": 0.5}, False, r'returned a dict without "loss" \(it has Loss\)'),
        ({}, False, "it is empty"),
        (0.5, True, r"must return the pair \(loss, aux\), but it returned a float"),
        ((0.5, 1, 2), True, "but it returned a tuple of 3"),
    ],
)
def test_losses_that_are_refused(returned: Any, has_aux: bool, message: str) -> None:
    with pytest.raises(LossError, match=message):
        split(returned, 1, has_aux=has_aux, shape_of=shape_of)


def test_any_mapping_will_do() -> None:
    class Own(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return {"loss": 0.5, "hits": 1}[key]

        def __iter__(self) -> Any:
            return iter(["loss", "hits"])

        def __len__(self) -> int:
            return 2

    assert split(Own(), 1, has_aux=True, shape_of=shape_of) == ((0.5,), {"hits": 1})
    assert rebuilt(Own(), {("loss",): 1, ("hits",): 2}) == {"loss": 1, "hits": 2}
