"""Batches that no axis cuts: lists of samples, packed sequences, graphs, images by patches."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bigbatch import BatchError, BigBatchWarning, OptionError, Window
from bigbatch.torch import Accumulator, train_with_accumulation, verify
from bigbatch.torch.cutting import Cutting

from .training import flat, sgd

N, WIDTH = 7, 4
LENGTHS = [5, 1, 3, 3, 8, 2, 6]
SIZES = [1, 2, 3, N - 1, N]
every_size = pytest.mark.parametrize("micro_batch_size", SIZES)


def made(make: Any = lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make().double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


def error(model: nn.Module, loss: Any, batch: Any, micro_batch_size: int, **options: Any) -> float:
    """How far the update is from that of the full batch."""
    full, before = copy.deepcopy(model), flat(model)
    loss(full, batch).backward()
    sgd(full).step()
    step = Accumulator(model, sgd(model), loss, micro_batch_size, **options).step(batch)
    assert step.num_micro_batches == -(-N // micro_batch_size)
    return float((flat(model) - flat(full)).norm() / (flat(full) - before).norm())


def assert_exact(model: nn.Module, loss: Any, batch: Any, micro_batch_size: int, **options: Any) -> None:
    assert error(copy.deepcopy(model), loss, batch, micro_batch_size, **options) <= 1e-12
    assert verify(model, batch, loss, micro_batch_size, **options)


# --- lists of samples ------------------------------------------------------------------------------------


def samples() -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(n, WIDTH).double(), "y": torch.randn(1).double(), "name": f"{n}"} for n in LENGTHS]


def list_loss(model: nn.Module, batch: list[dict[str, Any]]) -> Tensor:
    x = pad_sequence([sample["x"] for sample in batch], batch_first=True)
    counts = torch.tensor([len(sample["x"]) for sample in batch])
    mask = torch.arange(x.shape[1]) < counts[:, None]
    means = (model(x).squeeze(-1) * mask).sum(1) / counts
    return (means - torch.cat([sample["y"] for sample in batch])).square().mean()


@every_size
def test_a_list_of_samples(micro_batch_size: int) -> None:
    assert_exact(made(), list_loss, samples(), micro_batch_size, cut="list")


@every_size
@pytest.mark.parametrize("make", [tuple, list], ids=["tuples", "pairs of a list"])
def test_samples_that_are_tuples(make: Any, micro_batch_size: int) -> None:
    def of_tuples(model: nn.Module, batch: list[Any]) -> Tensor:
        return list_loss(model, [{"x": x, "y": y} for x, y in batch])

    assert_exact(made(), of_tuples, [make((s["x"], s["y"])) for s in samples()], micro_batch_size, cut="list")


@dataclasses.dataclass
class Detection:
    images: Any
    targets: Any
    scale: Any


DETECTIONS = {
    "tuple(zip(*samples))": lambda x, y: (tuple(x), tuple(y)),
    "tuple of lists": lambda x, y: (x, y),
    "dict of a list and a tensor": lambda x, y: {0: x, 1: torch.stack(y)},
    "with a 0-dim tensor": lambda x, y: (x, y, torch.tensor(2.0)),
    "dataclass": lambda x, y: Detection(x, y, "name"),
}


@every_size
@pytest.mark.parametrize("make", DETECTIONS.values(), ids=DETECTIONS)
def test_lists_with_an_item_for_each_sample(make: Any, micro_batch_size: int) -> None:
    def of_columns(model: nn.Module, batch: Any) -> Tensor:
        x, y = (batch.images, batch.targets) if isinstance(batch, Detection) else (batch[0], batch[1])
        assert len(x) == len(y)
        return list_loss(model, [{"x": one, "y": other} for one, other in zip(x, y, strict=True)])

    columns = [s["x"] for s in samples()], [s["y"] for s in samples()]
    assert_exact(made(), of_columns, make(*columns), micro_batch_size, cut="list")


def test_a_window_of_lists_counts_samples() -> None:
    found = []
    for window in (Window([samples()[:4], samples()[4:5], samples()[5:]]), samples()):
        model = made()
        step = Accumulator(model, sgd(model), list_loss, 2, cut="list").step(window)
        assert step.weight == N
        found.append(flat(model))
    assert (found[0] - found[1]).norm() <= 1e-12


def test_a_tuple_of_samples_is_refused_with_both_remedies() -> None:
    """`collate_fn=tuple` makes it, and read as a tuple of lists it has two samples."""
    x, y = [s["x"] for s in samples()], [s["y"] for s in samples()]
    cutting = Cutting(cut="list")
    alike = tuple((torch.ones(2), torch.zeros(2)) for _ in range(5))
    for batch in (
        tuple(zip(x, y, strict=True)),
        alike,
        tuple(map(list, alike)),
        tuple(zip(x[:2], ["a", "b"], strict=True)),
    ):
        with pytest.raises(BatchError, match=r"pass list\(batch\) if each .* sample, or tuple\(zip\(\*batch\)\)"):
            cutting(batch, 2)
        assert sum(cutting(list(batch), 2)[1]) == len(batch)
        assert sum(cutting(tuple(zip(*batch, strict=True)), 2)[1]) == len(batch)


def test_a_tuple_of_lists_with_few_samples_is_no_tuple_of_samples() -> None:
    image, boxes = torch.ones(3, 4, 4), {"boxes": torch.ones(2, 4)}
    for batch, size in (
        (((image,), (boxes,)), 1),
        (([image, image], [boxes, None], ["a", "b"]), 2),
        (((image,), (image,)), 1),
        (([image] * 3, [image] * 3), 3),
    ):
        assert Cutting(cut="list")(batch, 2)[1][0] == min(2, size)


def test_what_cannot_be_cut_as_a_list_is_refused() -> None:
    cutting = Cutting(cut="list")
    x = [torch.ones(2)] * 4
    for batch, message in (
        (torch.ones(4), r'the batch is a Tensor without lists, which cut="list" cannot cut: pass a list of samples'),
        ({"x": torch.ones(4)}, "the batch is a dict without lists"),
        ((x, [1, 2, 3]), r"batch\[0\] has 4 samples but batch\[1\] has 3: with cut=\"list\" each list has an item for"),
        ({"x": x, "y": torch.ones(3)}, r"batch\['x'\] has 4 samples but batch\['y'\] has 3"),
        ({"x": x, "y": np.ones(4)}, r"batch\['y'\] is a numpy array with 4 rows for 4 samples"),
        ([], "batch has 0 samples"),
    ):
        with pytest.raises(BatchError, match=message):
            cutting(batch, 2)
    options: Any = {"batch_axis": {"names": None, "y": 1}}
    (first, _), sizes = Cutting(cut="list", **options)({"x": x, "names": ["a"], "y": torch.ones(2, 4)}, 2)
    assert sizes == [2, 2]
    assert first["names"] == ["a"]
    assert first["y"].shape == (2, 2)
    assert cutting.is_empty([])
    assert not cutting.is_empty(x)


def test_a_list_that_may_be_samples_is_refused_with_both_remedies() -> None:
    sequences = [torch.randn(6, WIDTH).double() for _ in range(8)]
    model = made()

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return torch.stack([model(x).mean().square() for x in batch]).mean()

    with pytest.raises(BatchError, match=r'8 samples, or .* pass cut="list" in the first case, and tuple\(batch\)'):
        Accumulator(model, sgd(model), loss, 2).step(sequences)
    assert Accumulator(model, sgd(model), loss, 2, cut="list").step(sequences).num_micro_batches == 4
    with pytest.raises(
        BatchError, match=r'5 samples but batch\[1\] has 6: .*, or pass cut="list" if its lists have an'
    ):
        Accumulator(model, sgd(model), loss, 2).step([torch.ones(5, 2), torch.ones(6, 2)])
    with pytest.raises(BatchError, match=r'no tensor with a batch axis \(list\): .*, or cut="list"'):
        Accumulator(model, sgd(model), loss, 2).step([{"text": "a"}, {"text": "b"}])


# --- a packed batch --------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Attention within each sequence of a packed row; every sequence starts at position 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)

    def forward(self, ids: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        x = self.embed(ids) + positions[..., None].sin()
        segments = torch.bucketize(torch.arange(ids.shape[1]), offsets[1:], right=True)
        mask = (segments[:, None] == segments) & (segments[:, None] >= segments).tril()
        return self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))


def packed() -> dict[str, Any]:
    """As transformers' DataCollatorWithFlattening makes it: one row, and where each sequence begins."""
    torch.manual_seed(2)
    ids = torch.randint(30, (1, sum(LENGTHS)))
    offsets = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    labels = ids.clone()
    labels[0, offsets[:-1].long()] = -100
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"ids": ids, "labels": labels, "positions": positions, "offsets": offsets, "longest": max(LENGTHS)}


def packed_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits = model(batch["ids"], batch["positions"], batch["offsets"])
    labels = batch["labels"][0, 1:]
    return F.cross_entropy(logits[0, :-1], labels, reduction="sum") / (labels != -100).sum()


def packed_tokens(batch: dict[str, Any]) -> Tensor:
    return (batch["labels"][0, 1:] != -100).sum()


def cut_packed(batch: dict[str, Any], sizes: list[int]) -> Iterator[dict[str, Any]]:
    first = 0
    for size in sizes:
        offsets = batch["offsets"][first : first + size + 1]
        tokens = slice(int(offsets[0]), int(offsets[-1]))
        yield {
            **{name: batch[name][:, tokens] for name in ("ids", "labels", "positions")},
            "offsets": offsets - offsets[0],
            "longest": int(offsets.diff().max()),
        }
        first += size


PACKED: dict[str, Any] = {
    "cut": cut_packed,
    "num_samples": lambda batch: len(batch["offsets"]) - 1,
    "weight": packed_tokens,
}


@every_size
def test_a_packed_batch(micro_batch_size: int) -> None:
    assert_exact(made(Packed), packed_loss, packed(), micro_batch_size, **PACKED)


def test_a_packed_batch_that_an_axis_cuts_is_wrong() -> None:
    """The negative control: its leading axis is that of one row, and its second that of tokens."""
    with pytest.raises(BatchError, match=r"batch\['ids'\] has 1 samples but batch\['offsets'\] has 8"):
        Accumulator(model := made(Packed), sgd(model), packed_loss, 2).step(packed())
    axes = {"ids": 1, "labels": 1, "positions": 1, "offsets": None}
    found = verify(made(Packed), packed(), packed_loss, 15, weight=packed_tokens, batch_axis=axes)
    assert found.total_error > 1e-3


def test_windows_and_ready_made_micro_batches() -> None:
    """`num_samples` is the default weight of micro-batches that you cut yourself."""

    def per_sequence(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return model(batch["ids"], batch["positions"], batch["offsets"]).square().mean() * len(batch["offsets"])

    window = Window(cut_packed(packed(), [3, 3, 1]))
    model = made(Packed)
    accumulator = Accumulator(model, sgd(model), per_sequence, num_samples=PACKED["num_samples"])
    with pytest.warns(BigBatchWarning, match='"labels" with -100 in them but no weight was given'):
        assert accumulator.step(window).weight == N
    history = train_with_accumulation(
        model, [packed()] * 2, sgd(model), packed_loss, micro_batch_size=3, epochs=2, **PACKED
    )
    assert len(history.steps) == 4
    with pytest.raises(BatchError, match="the micro-batches of the window are those of a function by cut="):
        verify(model, window, packed_loss, 3, **PACKED)


# --- a batch of graphs -----------------------------------------------------------------------------------


class Graphs:
    """As PyTorch Geometric's Batch: the nodes of all graphs, and which graph each belongs to. Not a nest."""

    def __init__(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> None:
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y

    @property
    def num_graphs(self) -> int:
        return len(self.y)


def graphs(make: Any) -> Any:
    torch.manual_seed(3)
    ids = torch.repeat_interleave(torch.arange(N), torch.tensor(LENGTHS))
    starts = torch.tensor([0, *np.cumsum(LENGTHS)[:-1]])
    edges = [torch.randint(n, (2, 2 * n)) + start for n, start in zip(LENGTHS, starts.tolist(), strict=True)]
    return make(torch.randn(len(ids), WIDTH), torch.cat(edges, 1), ids, torch.randn(N))


def cut_graphs(batch: Any, sizes: list[int]) -> list[Any]:
    found, first = [], 0
    is_dict = isinstance(batch, dict)
    own = batch if is_dict else vars(batch)
    for size in sizes:
        nodes = (own["batch"] >= first) & (own["batch"] < first + size)
        start = int(nodes.int().argmax())
        edges = nodes[own["edge_index"][0]]
        parts = own["x"][nodes], own["edge_index"][:, edges] - start, own["batch"][nodes] - first
        part = (*parts, own["y"][first : first + size])
        found.append(dict(zip(own, part, strict=True)) if is_dict else Graphs(*part))
        first += size
    return found


def graph_loss(model: nn.Module, batch: Any) -> Tensor:
    own = batch if isinstance(batch, dict) else vars(batch)
    weights = next(model.parameters())
    x, (source, target) = own["x"].to(weights), own["edge_index"]  # not a nest, so verify() cannot cast it
    x = x + torch.zeros_like(x).index_add(0, target, x[source])
    sums = x.new_zeros(len(own["y"]), 1).index_add(0, own["batch"], model(x))
    return F.mse_loss(sums.squeeze(1), own["y"].to(weights))


def as_dict(x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": x, "edge_index": edge_index, "batch": batch, "y": y}


@every_size
@pytest.mark.parametrize("make", [as_dict, Graphs])
def test_graphs(make: Any, micro_batch_size: int) -> None:
    num_graphs = (lambda batch: len(batch["y"])) if make is as_dict else (lambda batch: batch.num_graphs)
    assert_exact(made(), graph_loss, graphs(make), micro_batch_size, cut=cut_graphs, num_samples=num_graphs)


# --- images by patches -----------------------------------------------------------------------------------


def images() -> dict[str, Tensor]:
    """As Qwen2-VL's processor makes it: a row of patches for all images, and how many each image has."""
    torch.manual_seed(4)
    grid = torch.tensor([[1, n, 2] for n in LENGTHS])
    num_patches = int(grid.prod(1).sum())
    patches = torch.randn(num_patches, WIDTH).double()
    return {"input_ids": torch.randint(9, (N, 5)), "pixel_values": patches, "image_grid_thw": grid}


def cut_images(batch: dict[str, Tensor], sizes: list[int]) -> Iterator[dict[str, Tensor]]:
    per_image = batch["image_grid_thw"].prod(1).tolist()
    first = 0
    for size in sizes:
        start, num = sum(per_image[:first]), sum(per_image[first : first + size])
        rows = {name: batch[name][first : first + size] for name in ("input_ids", "image_grid_thw")}
        yield {**rows, "pixel_values": batch["pixel_values"][start : start + num]}
        first += size


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    owners = torch.repeat_interleave(torch.arange(len(batch["input_ids"])), batch["image_grid_thw"].prod(1))
    found = model(batch["pixel_values"])
    sums = found.new_zeros(len(batch["input_ids"]), 1).index_add(0, owners, found)
    return F.mse_loss(sums.squeeze(1), batch["input_ids"].to(sums).mean(1))


IMAGES: dict[str, Any] = {"num_samples": lambda batch: len(batch["input_ids"])}


@every_size
def test_images_by_patches(micro_batch_size: int) -> None:
    assert_exact(made(), image_loss, images(), micro_batch_size, cut=cut_images, **IMAGES)
    whole = {"batch_axis": {"pixel_values": None}}  # the other tensors show how many samples there are
    assert_exact(made(), image_loss, images(), micro_batch_size, cut=cut_images, **whole)


@every_size
def test_aux_has_a_row_for_each_sample(micro_batch_size: int) -> None:
    def with_rows(model: nn.Module, batch: Any) -> Any:
        sums = torch.stack([batch["image_grid_thw"].prod(1), batch["input_ids"].sum(1)], 1)
        return image_loss(model, batch), sums

    batch, model = images(), made()
    accumulator = Accumulator(model, sgd(model), with_rows, micro_batch_size, cut=cut_images, **IMAGES, has_aux=True)
    assert torch.equal(accumulator.step(batch).aux, with_rows(model, batch)[1])

    def of_list(model: nn.Module, batch: Any) -> Any:
        return list_loss(model, batch), torch.tensor([len(sample["x"]) for sample in batch])

    accumulator = Accumulator(model, sgd(model), of_list, micro_batch_size, cut="list", has_aux=True)
    assert accumulator.step(samples()).aux.tolist() == LENGTHS


# --- what a function returns is checked ------------------------------------------------------------------


def parts_of(*ranges: tuple[int, int]) -> Any:
    """A cut that returns these sequences, whatever the sizes."""

    def cut(batch: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
        return [list(cut_packed(batch, [a, b - a] if a else [b]))[-1] for a, b in ranges]

    return cut


BAD: dict[str, tuple[Any, str]] = {
    "the last sample is dropped": (parts_of((0, 3), (3, 5), (5, 6)), "2 samples instead of 3"),
    "the last micro-batch is dropped": (
        parts_of((0, 3), (3, 6)),
        r"cut returned 2 micro-batches for the sizes \[3, 3, 1",
    ),
    "a sample is repeated": (
        parts_of((0, 3), (2, 6), (6, 7)),
        "micro-batch 2 that cut returned has 4 samples instead of 3",
    ),
    "one is repeated, one left out": (
        parts_of((0, 3), (2, 5), (6, 7)),
        r"batch\['ids'\] has the shape \(1, 28\), but in",
    ),
    "a tensor": (lambda batch, sizes: batch["ids"], "cut returned a Tensor: return a list with 3 micro-batches"),
    "nothing": (lambda batch, sizes: None, "cut returned a NoneType"),
    "a key is lost": (
        lambda batch, sizes: [{k: v for k, v in p.items() if k != "positions"} for p in cut_packed(batch, sizes)],
        r"batch\['positions'\] has the shape \(1, 28\), but in the micro-batches that cut returned it has none",
    ),
    "the same tokens each time": (
        lambda batch, sizes: [{**part, "ids": batch["ids"][:, :9]} for part in cut_packed(batch, sizes)],
        r"batch\['ids'\] has the shape .* \(1, 9\), \(1, 9\), \(1, 9\), which do not add up: return each sample once",
    ),
}


@pytest.mark.parametrize(("cut", "message"), BAD.values(), ids=BAD)
def test_a_cut_that_is_not_the_batch_is_refused(cut: Any, message: str) -> None:
    model = made(Packed)
    before = flat(model)
    options = {**PACKED, "cut": cut}
    with pytest.raises(BatchError, match=message):
        Accumulator(model, sgd(model), packed_loss, 3, **options).step(packed())
    with pytest.raises(BatchError, match=message):
        verify(model, packed(), packed_loss, 3, **options)
    assert torch.equal(flat(model), before)


def test_offsets_may_be_left_as_they_are() -> None:
    """Where one sequence ends the next one begins, so that two micro-batches have that number."""

    def unchanged(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
        ends = np.cumsum([0, *sizes])
        return [{"offsets": batch["offsets"][a : b + 1]} for a, b in itertools.pairwise(ends)]

    cutting = Cutting(cut=unchanged, num_samples=PACKED["num_samples"])
    assert cutting({"offsets": packed()["offsets"]}, 3)[1] == [3, 3, 1]


def test_a_cut_that_does_not_move_on_is_refused() -> None:
    """All samples have one size, so sizes agree: only the memory shows that they are the same samples."""

    def first_ones(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
        return [{name: tensor[:size] for name, tensor in batch.items()} for size in sizes]

    def overlapping(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
        return [{name: tensor[k : k + 2] for name, tensor in batch.items()} for k in (0, 1, 4)]

    batch = {"x": torch.randn(6, WIDTH).double(), "y": torch.randn(6).double()}
    for wrong in (first_ones, overlapping):
        with pytest.raises(
            BatchError, match=r"cut returned some elements of batch\['x'\] twice, since two micro-batches"
        ):
            Cutting(cut=wrong)(batch, 2)
    assert (
        Cutting(cut=lambda batch, sizes: [{"x": x} for x in batch["x"].split(sizes)])({"x": batch["x"]}, 2)[1]
        == [2] * 3
    )
    prompt = {"x": batch["x"], "prompt": torch.ones(4)}  # passed whole: all have the same
    assert (
        Cutting(
            cut=lambda batch, sizes: [{**prompt, "x": x} for x in batch["x"].split(sizes)],
            num_samples=lambda b: len(b["x"]),
        )(prompt, 2)[1]
        == [2] * 3
    )


def test_weights_that_do_not_add_up_are_refused() -> None:
    """Sizes agree, but each micro-batch has lost the labels of its last sequence."""

    def unlabelled(batch: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
        parts = list(cut_packed(batch, sizes))
        for part in parts:
            part["labels"] = part["labels"].clone()
            part["labels"][0, int(part["offsets"][-2]) :] = -100
        return parts

    model = made(Packed)
    with pytest.raises(
        BatchError, match=r"the weight of the batch is 21, but those of the micro-batches .* add up to 13"
    ):
        Accumulator(model, sgd(model), packed_loss, 3, **{**PACKED, "cut": unlabelled}).step(packed())


def test_what_need_not_add_up_may_be_named() -> None:
    def trimmed(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
        """Drops the padding that no sample of a micro-batch needs, and looks up what is left anew."""
        found = []
        for x, n in zip(batch["x"].split(sizes), batch["n"].split(sizes), strict=True):
            longest = int(n.max())
            found.append({"x": x[:, :longest], "n": n, "positions": torch.arange(longest + 2)})
        return found

    def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = torch.arange(batch["x"].shape[1]) < batch["n"][:, None]
        return ((model(batch["x"]).squeeze(-1) * mask).sum(1) / batch["n"]).square().mean()

    n = torch.tensor(LENGTHS)
    batch = {"x": torch.randn(N, 8, WIDTH).double(), "n": n, "positions": torch.arange(10)}
    for size in SIZES:
        assert error(made(), mean, batch, size, cut=trimmed, batch_axis={"positions": None}) <= 1e-12
    with pytest.raises(BatchError, match=r"batch\['positions'\] has the shape \(10,\).*or let batch_axis say None"):
        error(made(), mean, batch, 3, cut=trimmed, num_samples=lambda batch: len(batch["x"]))


@pytest.mark.parametrize("found", [0, None, 2.5, True])
def test_a_number_of_samples_that_is_none_is_refused(found: Any) -> None:
    model = made(Packed)
    options = {**PACKED, "num_samples": lambda batch: found}
    message = "the batch has 0 samples" if found == 0 else f"num_samples returned {found} for the"
    with pytest.raises(BatchError, match=message):
        Accumulator(model, sgd(model), packed_loss, 3, **options).step(packed())


def test_a_number_of_samples_that_nothing_shows_is_asked_for() -> None:
    model = made(Packed)
    with pytest.raises(
        BatchError, match=r"cut= does not know how many samples the batch has, .*num_samples=lambda batch"
    ):
        Accumulator(model, sgd(model), packed_loss, 3, cut=cut_packed).step(packed())
    for three in (3, np.int64(3), torch.tensor(3)):
        assert Cutting(cut=cut_packed, num_samples=lambda batch, three=three: three).size(packed()) == 3


@pytest.mark.parametrize("bad", ["rows", 3, ["list"]])
def test_what_is_no_cut_is_refused(bad: Any) -> None:
    model = made(Packed)
    with pytest.raises(
        OptionError, match=r'cut is .*: pass "list", a function \(batch, sizes\) -> micro_batches, or None'
    ):
        Accumulator(model, sgd(model), packed_loss, 3, cut=bad)


# --- verify ----------------------------------------------------------------------------------------------


def test_the_accumulator_verifies_with_its_own_options() -> None:
    model = made(Packed)
    assert Accumulator(model, sgd(model), packed_loss, 3, **PACKED).verify(packed())
    model = made()
    accumulator = Accumulator(model, sgd(model), list_loss, 3, cut="list")
    assert accumulator.verify(samples())
    assert accumulator.verify(Window([samples()[:3], samples()[3:]]))


def test_verify_of_a_wrong_cut_says_what_to_check() -> None:
    """Positions do not begin anew, which no size shows."""

    def shifted(batch: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
        parts = list(cut_packed(batch, sizes))
        return [{**part, "positions": part["positions"] + k} for k, part in enumerate(parts)]

    found = verify(made(Packed), packed(), packed_loss, 3, **{**PACKED, "cut": shifted})
    assert not found
    assert "check that it gives each of them its own samples, with offsets and ids that begin anew" in str(found)

    def loop(model: nn.Module, micro_batches: list[Any]) -> None:
        model.zero_grad()
        for micro_batch in micro_batches:
            (packed_loss(model, micro_batch) * packed_tokens(micro_batch) / packed_tokens(packed())).backward()

    assert verify(made(Packed), packed(), packed_loss, 3, **PACKED, step=loop)


def test_verify_names_a_list_of_samples() -> None:
    def mean(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return torch.stack([model(x).mean(0).square().mean() for x in batch]).mean()

    batch = [torch.randn(6, WIDTH).double() for _ in range(2)]
    found = verify(made(), batch, mean, 3)
    assert not found
    assert 'pass cut="list"' in str(found)
    assert verify(made(), batch, mean, 1, cut="list")
    assert verify(made(), Window([batch, batch[:1], batch[1:]]), mean, 1, cut="list")


def test_verify_diagnoses_lists_like_other_batches() -> None:
    def added_up(model: nn.Module, batch: list[dict[str, Any]]) -> Tensor:
        return list_loss(model, batch) * len(batch)

    found = verify(made(), samples(), added_up, 2, cut="list")
    assert not found
    assert "adds up over samples" in str(found)
