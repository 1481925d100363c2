"""Batches of other shapes on the GPU: captured, and copied there micro-batch by micro-batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch.torch import Accumulator
from bigbatch.torch.batch import map_tensors

from . import test_batch_axis as axes
from . import test_cutting as cutting
from .test_gpu import pytestmark  # noqa: F401
from .training import flat, sgd


def listed() -> list[Any]:
    """Three lengths, so that micro-batches of one sample have shapes that come again."""
    torch.manual_seed(1)
    return [(torch.randn(n, cutting.WIDTH).double(), torch.randn(1).double()) for n in (5, 3, 5, 3, 5, 3, 5)]


def list_loss(model: nn.Module, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([(model(x).mean(0) - y).square().mean() for x, y in batch]).mean()


def packed_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """As `test_cutting.packed_loss`, with what the model needs made on the device."""
    segments = batch["segments"][0]
    mask = (segments[:, None] == segments).tril()
    x = model.embed(batch["ids"]) + batch["positions"][..., None].sin()
    logits = model.head(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask))
    labels = batch["labels"][0, 1:]
    return nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum") / (labels != -100).sum()


def packed() -> dict[str, Any]:
    """Sequences of two lengths, so that all micro-batches but the last have one shape."""
    torch.manual_seed(2)
    lengths = torch.tensor([4, 2, 4, 2, 4, 2, 4])
    ids = torch.randint(30, (1, int(lengths.sum())))
    segments = torch.repeat_interleave(torch.arange(7), lengths)[None]
    is_first = torch.diff(segments, prepend=torch.tensor([[-1]])) > 0
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    return {"ids": ids, "segments": segments, "positions": positions, "labels": ids.masked_fill(is_first, -100)}


def num_sequences(batch: dict[str, Tensor]) -> int:
    return len(batch["segments"].unique())


def cut_packed(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    found, first = [], 0
    for size in sizes:
        own = (batch["segments"][0] >= first) & (batch["segments"][0] < first + size)
        part = {name: tensor[:, own] for name, tensor in batch.items()}
        found.append({**part, "segments": part["segments"] - first})
        first += size
    return found


PACKED = {"cut": cut_packed, "num_samples": num_sequences, "weight": cutting.packed_tokens}
WORK: dict[str, tuple[Any, Any, Any, int, dict[str, Any]]] = {
    "LSTM": (
        lambda: axes.made(axes.Recurrent),
        axes.loss,
        axes.ragged,
        2,
        {"batch_axis": 1, "weight": axes.num_tokens},
    ),
    "Transformer": (
        lambda: axes.made(axes.Translation),
        axes.loss,
        axes.ragged,
        2,
        {"batch_axis": 1, "weight": axes.num_tokens},
    ),
    "axes that differ": (
        lambda: axes.made(axes.Recurrent),
        axes.mixed_loss,
        axes.mixed_batch,
        2,
        {"batch_axis": (1, 0, None)},
    ),
    "list": (cutting.made, list_loss, listed, 1, {"cut": "list"}),
    "packed": (lambda: cutting.made(cutting.Packed), packed_loss, packed, 2, PACKED),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", WORK)
def test_exact(kind: str, capture: bool, place: str) -> None:
    make, loss, make_batch, size, options = WORK[kind]
    batch = map_tensors(lambda tensor: tensor.to(place), make_batch())
    whole = map_tensors(Tensor.cuda, batch)
    full, model = make().cuda(), make().cuda()
    before = flat(full)
    optimizer = sgd(full)
    accumulator = Accumulator(model, sgd(model), loss, size, capture=capture, **options)
    for _ in range(3):
        optimizer.zero_grad()
        loss(full, whole).backward()
        optimizer.step()
        accumulator.step(batch)
    assert (flat(model) - flat(full)).norm() <= 1e-10 * (flat(full) - before).norm()
    if capture:
        assert accumulator._captured is not None
        assert accumulator._captured.num_replays > 0
