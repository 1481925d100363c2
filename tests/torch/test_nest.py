"""A batch is any nest of tensors. Each cut is compared with slices taken by hand."""

import dataclasses
import functools
import re
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers.tokenization_utils_base import BatchEncoding

from bigbatch import BatchError
from bigbatch.torch.batch import batch_size, cut, leaves, map_tensors, part_of_rank, tensors

N = 7
SIZES = [3, 3, 1]
X = torch.arange(N * 2, dtype=torch.float64).reshape(N, 2)
Y = torch.arange(N) + 100
Z = torch.arange(N * 6).reshape(N, 3, 2) - 50


class Pair(NamedTuple):
    x: Any
    y: Any
    note: str = "note"


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any
    note: str = "note"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any
    note: str = "note"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


@dataclasses.dataclass
class Late:
    """Sets a field in __post_init__, which must not run again on a part of the batch."""

    x: Any
    total: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = float(self.x.sum())


def parts(tensor):
    return [tensor[0:3], tensor[3:6], tensor[6:7]]


def assert_equal(found, expected):
    """Asserts that both nests have the same classes, tensors and other values."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert found.layout == expected.layout
        assert torch.equal(found.to_dense(), expected.to_dense())
    elif isinstance(expected, dict | UserDict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found is expected


def ordered(x, y):
    return OrderedDict([("y", y), ("x", x)])


def default(x, y):
    made = defaultdict(list)
    made["x"], made["y"] = x, y
    return made


NESTS = {
    "tensor": lambda x, y, z: x,
    "tuple": lambda x, y, z: (x, y),
    "tuple of one": lambda x, y, z: (x,),
    "list": lambda x, y, z: [x, y],
    "dict": lambda x, y, z: {"x": x, "y": y},
    "OrderedDict": lambda x, y, z: ordered(x, y),
    "defaultdict": lambda x, y, z: default(x, y),
    "UserDict": lambda x, y, z: UserDict(x=x, y=y),
    "BatchEncoding": lambda x, y, z: BatchEncoding({"input_ids": x, "attention_mask": y}),
    "NamedTuple": lambda x, y, z: Pair(x, y),
    "dataclass": lambda x, y, z: Plain(x, y),
    "frozen dataclass": lambda x, y, z: Frozen(x, y),
    "slotted dataclass": lambda x, y, z: Slotted(x, y),
    "tuple in tuple": lambda x, y, z: ((x, y), z),
    "dict in tuple": lambda x, y, z: ({"a": x, "b": y}, z),
    "one dict and a tensor": lambda x, y, z: ({"a": x}, z),
    "two tensors in one place and none in the other": lambda x, y, z: ((x, y), "note"),
    "a dict of two and None": lambda x, y, z: ({"a": x, "b": y}, None),
    "empty beside full": lambda x, y, z: ((x, y, z), (), []),
    "a tensor and a word": lambda x, y, z: (x, "note"),
    "mix": lambda x, y, z: {"p": Pair([x, {"z": z}], Frozen(y, (x, None))), "n": 3, "o": ordered(z, [y, "s"])},
    "encoding in a mix": lambda x, y, z: [Plain(BatchEncoding({"a": x}), (y,)), [[z]]],
    "the same tensor twice": lambda x, y, z: (x, [x, x]),
}


@pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)
def test_cuts_like_slices_by_hand(make):
    micro_batches, sizes = cut(make(X, Y, Z), 3)
    assert sizes == SIZES
    assert len(micro_batches) == 3
    expected = [make(*rows) for rows in zip(parts(X), parts(Y), parts(Z), strict=True)]
    for micro_batch, by_hand in zip(micro_batches, expected, strict=True):
        assert_equal(micro_batch, by_hand)


@pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)
def test_batch_does_not_change(make):
    batch = make(X, Y, Z)
    cut(batch, 2)
    batch_size(batch)
    assert_equal(batch, make(X, Y, Z))


@pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)
def test_micro_batches_are_views(make):
    memory = {tensor.untyped_storage().data_ptr() for tensor in (X, Y, Z)}
    micro_batches, _ = cut(make(X, Y, Z), 3)
    for micro_batch, first in zip(micro_batches, (0, 3, 6), strict=True):
        for part, whole in zip(tensors(micro_batch), tensors(make(X, Y, Z)), strict=True):
            assert part.data_ptr() == whole[first:].data_ptr()
            assert part.untyped_storage().data_ptr() in memory


@pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)
def test_names_go_with_tensors(make):
    batch = make(X, Y, Z)
    named = [(name, leaf) for name, leaf in leaves(batch, "batch") if isinstance(leaf, torch.Tensor)]
    assert len(named) == len(tensors(batch))
    for (name, _), tensor in zip(named, tensors(batch), strict=True):
        assert eval(name, {"batch": batch}) is tensor  # a name is the Python expression for the leaf


@pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)
def test_batch_size(make):
    assert batch_size(make(X, Y, Z)) == N


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 6, 7, 10])
def test_sizes(micro_batch_size):
    micro_batches, sizes = cut((X, Y), micro_batch_size)
    assert sizes == [len(x) for x, _ in micro_batches]
    assert sum(sizes) == N
    assert all(size == micro_batch_size for size in sizes[:-1])
    assert torch.equal(torch.cat([x for x, _ in micro_batches]), X)


def test_gradient_reaches_the_batch():
    x = X.clone().requires_grad_()
    for micro_batch in cut({"x": x}, 3)[0]:
        (micro_batch["x"] ** 2).sum().backward()
    assert torch.equal(x.grad, 2 * X)


# --- containers that hold more than their items ---------------------------------------------------------


def test_defaultdict_keeps_its_factory():
    micro_batch = cut(default(X, Y), 3)[0][0]
    assert micro_batch["new"] == []


def test_micro_batches_do_not_share_their_dict():
    first, second, _ = cut({"x": X}, 3)[0]
    first["extra"] = 1
    assert "extra" not in second


def test_batch_encoding_keeps_its_behaviour():
    batch = BatchEncoding({"input_ids": Y[:, None], "labels": Y})
    micro_batch = cut(batch, 3)[0][1]
    assert isinstance(micro_batch, BatchEncoding)
    assert torch.equal(micro_batch.input_ids, Y[3:6, None])
    assert set(micro_batch.keys()) == {"input_ids", "labels"}
    assert dict(**micro_batch)["labels"].tolist() == [103, 104, 105]
    assert micro_batch.to("cpu")["labels"].tolist() == [103, 104, 105]


def test_dataclass_is_not_initialised_again():
    batch = Late(X)
    first = cut(batch, 3)[0][0]
    assert first.total == batch.total
    assert torch.equal(first.x, X[:3])


def test_dataclass_class_is_not_a_batch():
    with pytest.raises(BatchError, match="no tensor with a batch axis"):
        batch_size(Plain)


def test_map_tensors_keeps_the_shape_of_the_nest():
    found = map_tensors(lambda tensor: tensor.shape[0], {"a": (X, [Y]), "b": Frozen(Z, None)})
    assert found == {"a": (7, [7]), "b": Frozen(7, None)}


# --- values that belong to no sample ---------------------------------------------------------------------------


def test_0_dim_tensor_is_passed_whole():
    temperature = torch.tensor(0.5)
    for micro_batch in cut((X, temperature), 3)[0]:
        assert micro_batch[1] is temperature


@pytest.mark.parametrize("rest", ["text", 3, None, 2.5, b"x", {"a", "b"}, range(7), len, torch.float64, (), [1, 2]])
def test_values_that_are_not_tensors_are_passed_whole(rest):
    for micro_batch in cut((X, rest), 3)[0]:
        assert micro_batch[1] == rest
        assert type(micro_batch[1]) is type(rest)
    for micro_batch in cut({"x": X, "rest": rest, "y": Y}, 3)[0]:
        assert micro_batch["rest"] == rest


def test_objects_are_passed_unchanged():
    thing = object()
    assert all(micro_batch["thing"] is thing for micro_batch in cut({"x": X, "thing": thing}, 3)[0])


# --- other layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_coalesced", [True, False])
def test_cuts_sparse_coo(is_coalesced):
    dense = torch.tensor([[0, 1.0], [2, 0], [0, 0], [3, 4], [0, 0], [0, 0], [5, 0]])
    sparse = dense.to_sparse()
    if not is_coalesced:  # every entry in two halves
        halves = (torch.cat([sparse.indices()] * 2, 1), torch.cat([sparse.values() / 2] * 2))
        sparse = torch.sparse_coo_tensor(*halves, sparse.shape, check_invariants=True)
    assert sparse.is_coalesced() is is_coalesced
    micro_batches, sizes = cut({"x": sparse, "y": Y}, 3)
    assert sizes == SIZES
    for micro_batch, by_hand in zip(micro_batches, parts(dense), strict=True):
        assert micro_batch["x"].layout is torch.sparse_coo
        assert torch.equal(micro_batch["x"].to_dense(), by_hand)


def assert_refused(batch, *words):
    with pytest.raises(BatchError) as caught:
        cut(batch, 3)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_refuses_sparse_csr():
    assert_refused((X.to_sparse_csr(), Y), "torch.sparse_csr", "pass it dense, or feed its micro-batches as a Window")


def test_refuses_jagged():
    jagged = torch.nested.nested_tensor([torch.ones(k + 1) for k in range(N)], layout=torch.jagged)
    assert_refused((jagged, Y), "torch.jagged", "pass it dense, or feed its micro-batches as a Window")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refuses_strided_nested_tensors():
    nested = torch.nested.nested_tensor([torch.ones(k + 1) for k in range(N)], layout=torch.strided)
    assert_refused((nested, Y), "cannot be cut")


@pytest.mark.parametrize(
    "strided",
    [X.t().contiguous().t(), X[:, :1], torch.ones(1, 2).expand(N, 2), Z.permute(0, 2, 1)],
    ids=["transposed", "column", "expanded", "permuted"],
)
def test_cuts_any_strides(strided):
    for (found,), by_hand in zip(cut((strided,), 3)[0], parts(strided), strict=True):
        assert torch.equal(found, by_hand)
        assert found.stride() == by_hand.stride()


# --- batches that cannot be cut --------------------------------------------------------------------------

SHORT = Y[:5]


@pytest.mark.parametrize(
    ("batch", "first", "other"),
    [
        ((X, SHORT), "batch[0]", "batch[1]"),
        ([X, Y, SHORT], "batch[0]", "batch[2]"),
        ({"x": X, "y": SHORT}, "batch['x']", "batch['y']"),
        ({0: X, "y": {"deep": [Y, SHORT]}}, "batch[0]", "batch['y']['deep'][1]"),
        (ordered(SHORT, X), "batch['y']", "batch['x']"),
        (BatchEncoding({"input_ids": X, "labels": SHORT}), "batch['input_ids']", "batch['labels']"),
        (Pair(X, SHORT), "batch.x", "batch.y"),
        (Pair((Y, "note"), [X, SHORT]), "batch.x[0]", "batch.y[1]"),
        (Plain(X, SHORT), "batch.x", "batch.y"),
        (Frozen({"a": X}, SHORT), "batch.x['a']", "batch.y"),
        (Slotted(X, Pair(Y, SHORT)), "batch.x", "batch.y.y"),
        ((torch.tensor(1.0), X, SHORT), "batch[1]", "batch[2]"),
    ],
)
def test_error_names_both_tensors_and_sizes(batch, first, other):
    message = re.escape(f"{first} has 7 samples but {other} has 5: all tensors of a batch share their leading axis")
    with pytest.raises(BatchError, match=f"^{message}"):
        cut(batch, 3)


def test_error_uses_the_callers_name_for_the_batch():
    with pytest.raises(BatchError, match=r"^micro_batch\[2\]\[0\] has 7 samples but micro_batch\[2\]\[1\] has 5"):
        batch_size((X, SHORT), "micro_batch[2]")


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        (X[:0], "batch"),
        ((X[:0], Y[:0]), "batch[0]"),
        ({"x": X[:0]}, "batch['x']"),
        (Plain(X[:0], Y[:0]), "batch.x"),
        ((torch.tensor(1.0), X[:0]), "batch[1]"),
    ],
)
def test_refuses_an_empty_batch(batch, name):
    with pytest.raises(BatchError, match=f"^{re.escape(name)} has 0 samples: leave empty batches out of the stream$"):
        cut(batch, 3)


@pytest.mark.parametrize("batch", [(X, Y[:0]), (X[:0], Y)])
def test_refuses_a_partly_empty_batch(batch):
    with pytest.raises(BatchError, match=r"batch\[0\] has (7|0) samples but batch\[1\] has (0|7)"):
        cut(batch, 3)


@pytest.mark.parametrize(
    "batch",
    [None, "text", 3, (), {}, [1, 2], {"a": "b"}, torch.tensor(3.0), (torch.tensor(3.0), 4), Plain(1, 2), (None,)],
)
def test_refuses_a_batch_without_a_batch_axis(batch):
    with pytest.raises(BatchError, match="no tensor with a batch axis") as caught:
        cut(batch, 3)
    assert type(batch).__name__ in str(caught.value)


@pytest.mark.parametrize("batch", [{X}, iter([X])])
def test_refuses_containers_it_cannot_rebuild(batch):
    with pytest.raises(BatchError, match="no tensor with a batch axis"):
        cut(batch, 3)


@dataclasses.dataclass
class Masked:
    mask: Tensor

    @functools.cached_property
    def num_tokens(self):
        return int(self.mask.sum())


def test_cached_property_is_computed_again():
    batch = Masked(torch.tensor([1, 1, 0, 1, 1]))
    assert batch.num_tokens == 4
    assert [part.num_tokens for part in cut(batch, 3)[0]] == [2, 2]
    assert vars(batch)["num_tokens"] == 4


class PairOfOwn(tuple):
    """A tuple with other arguments in __new__ and an attribute besides its items."""

    def __new__(cls, x, y):
        made = super().__new__(cls, (x, y))
        made.name = "pair"
        return made

    @property
    def x(self):
        return self[0]


class NamedOfOwn(NamedTuple("Base", [("x", Any), ("y", Any)])):
    def __new__(cls, x):
        return super().__new__(cls, x, 2 * x)


class ListOfOwn(list):
    @property
    def x(self):
        return self[0]


def test_list_with_one_item_per_sample_is_refused_with_cut_as_remedy():
    """Detection models use such lists: each image has its own boxes."""
    batch = {"images": torch.ones(3, 1, 4, 4), "targets": [{"boxes": torch.ones(num, 4)} for num in (1, 5, 2)]}
    with pytest.raises(
        BatchError, match=r"3 samples but batch\['targets'\]\[0\]\['boxes'\] has 1.*or pass cut=\"list\" if its lists"
    ):
        cut(batch, 2)


def test_subclasses_of_tuple_and_list_are_kept():
    for batch in (PairOfOwn(X, 2 * X), NamedOfOwn(X), ListOfOwn([X, 2 * X])):
        for number, part in enumerate(cut(batch, 3)[0]):
            assert type(part) is type(batch)
            assert torch.equal(part.x, X[3 * number : 3 * number + 3])
            assert torch.equal(part[1], 2 * part.x)
        assert len(batch[0]) == len(X)
    assert cut(PairOfOwn(X, X), 3)[0][0].name == "pair"
    assert torch.equal(cut(torch.sort(X, 1), 3)[0][0].values, torch.sort(X[:3], 1).values)


class Attributes(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


def test_a_dict_whose_items_are_its_attributes():
    for part, rows in zip(cut(Attributes(x=X), 4)[0], X.split(4), strict=True):
        assert torch.equal(part.x, rows)
        part["y"] = part.x
        assert part.y is part["x"]


def test_list_of_numbers_with_micro_batch_size_1_is_refused():
    """It would be broadcast silently; with larger micro-batches the shapes do not fit in the loss."""
    for labels in ([0.5] * 7, {"y": [1] * 7}):
        with pytest.raises(BatchError, match="a list of 7 numbers is passed whole to every micro-batch"):
            cut((X, labels), 1)
        assert len(cut((X, labels), 2)[0]) == 4
    assert len(cut((X, (0.5,) * 7, [0.5, 0.7]), 1)[0]) == 7


def test_packed_sequences_are_refused():
    packed = pack_sequence([X[:, 0]])  # as many rows as time steps
    with pytest.raises(BatchError, match=r"batch\['x'\] is a PackedSequence of 7 times"):
        cut({"x": packed}, 3)


def test_immutable_mapping_is_cut_into_dicts():
    micro_batches, sizes = cut(types.MappingProxyType({"x": X, "note": "kept"}), 4)
    assert sizes == [4, 3]
    assert [type(m) for m in micro_batches] == [dict, dict]
    assert torch.equal(micro_batches[1]["x"], X[4:])
    assert micro_batches[1]["note"] == "kept"


def test_custom_mapping_is_passed_whole():
    class Own(MutableMapping):
        def __init__(self, inner):
            self.inner = inner

        def __getitem__(self, key):
            return self.inner[key]

        def __setitem__(self, key, value):
            self.inner[key] = value

        def __delitem__(self, key):
            del self.inner[key]

        def __iter__(self):
            return iter(self.inner)

        def __len__(self):
            return len(self.inner)

    batch = Own({"x": X, "y": Y})
    micro_batches, _ = cut(batch, 3)
    assert batch["x"] is X
    assert torch.equal(micro_batches[0]["x"], X[:3])


@pytest.mark.parametrize("make", [lambda a: (X, a), lambda a: {"x": X, "more": [a]}])
def test_an_array_with_a_row_per_sample_is_refused(make):
    with pytest.raises(BatchError, match=r"numpy array with 7 rows for 7 samples"):
        cut(make(np.zeros((7, 2))), 3)
    assert len(cut(make(np.zeros((5, 2))), 3)[0]) == 3


def test_shares_of_ranks() -> None:
    batch = {"x": X, "y": (Y.to_sparse(), "note"), "scale": torch.tensor(2.0)}
    first, second = (part_of_rank(batch, rank, 2) for rank in range(2))
    assert torch.equal(first["x"], X[:4])
    assert torch.equal(second["x"], X[4:])
    assert torch.equal(second["y"][0].to_dense(), Y[4:])
    assert second["y"][1] == "note"
    assert second["scale"] == 2
    assert [None if part is None else len(part) for part in (part_of_rank(X[:2], rank, 3) for rank in range(3))] == [
        1,
        1,
        None,
    ]


def sequences(num: int) -> list[Any]:
    return [torch.randn(6, 3) for _ in range(num)]


SAMPLES: dict[str, Any] = {
    "sequences": sequences(4),
    "sequences and tags": [(x, torch.arange(6)) for x in sequences(4)],
    "sequences and labels": [(x, torch.tensor(1)) for x in sequences(3)],
    "dicts": [{"x": x, "y": 1} for x in sequences(5)],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_ambiguous_list_is_refused(name: str) -> None:
    batch = SAMPLES[name]
    with pytest.raises(
        BatchError, match=rf"list of {len(batch)} items of one shape, \(6, 3\).*cut=\"list\".*tuple\(batch\)"
    ):
        cut(batch, 2)


def test_unambiguous_lists_are_cut() -> None:
    for batch in (
        sequences(2),
        tuple(sequences(4)),
        {"views": sequences(4), "y": torch.arange(6)},
        [torch.randn(6, 3), torch.randn(6, 3), torch.arange(6)],
    ):
        assert cut(batch, 4)[1] == [4, 2]
