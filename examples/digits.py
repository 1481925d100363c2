"""Trains on handwritten digits twice: with the full batch, and in micro-batches of a twelfth of its size.

The loss histories agree to the last digit shown, and the weights agree up to rounding. Only the activations of one
micro-batch must fit into memory.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bigbatch import History
from bigbatch.torch import Accumulator, verify

BATCH_SIZE = 384
MICRO_BATCH_SIZE = 32
EPOCHS = 15

images, classes = load_digits(return_X_y=True)
x = torch.tensor(images / 16.0).unflatten(1, (1, 8, 8))  # float64, so that any difference is rounding
y = torch.tensor(classes)
torch.manual_seed(0)
held_out = torch.rand(len(x)) < 1 / 6
x_train, y_train, x_test, y_test = x[~held_out], y[~held_out], x[held_out], y[held_out]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 3 * 3, 10),
    ).double()  # fmt: skip


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(micro_batch_size: int) -> tuple[nn.Module, History]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accumulator = Accumulator(model, optimizer, loss, micro_batch_size=micro_batch_size, clip_norm=1.0)
    history = History()
    for _ in range(EPOCHS):
        order = torch.randperm(len(x_train))  # make_model sets the seed, so both runs have the same order
        for rows in order.split(BATCH_SIZE):  # the last batch of an epoch is smaller and does not divide evenly
            history.append(accumulator.step((x_train[rows], y_train[rows])))
        history.end_epoch()
    return model, history


def train_full() -> tuple[nn.Module, list[float]]:
    """The plain loop, without bigbatch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(EPOCHS):
        order = torch.randperm(len(x_train))
        total = 0.0
        for rows in order.split(BATCH_SIZE):
            optimizer.zero_grad()
            value = loss(model, (x_train[rows], y_train[rows]))
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += value.item() * len(rows)
        losses.append(total / len(x_train))
    return model, losses


full, full_losses = train_full()
ours, history = train(MICRO_BATCH_SIZE)

print(f"batch of {BATCH_SIZE}, in micro-batches of {MICRO_BATCH_SIZE}")
print("epoch   full batch   accumulated")
for epoch, (a, b) in enumerate(zip(full_losses, history.losses, strict=True), 1):
    print(f"{epoch:5}   {a:.8f}   {b:.8f}")
gap = max(((a - b).norm() / a.norm()).item() for a, b in zip(full.parameters(), ours.parameters(), strict=True))
accuracy = (ours(x_test).argmax(1) == y_test).double().mean().item()
print(f"the weights are {gap:.1e} apart, relative; accuracy on held-out digits: {accuracy:.1%}")
print()
print(verify(ours, (x_train[:BATCH_SIZE], y_train[:BATCH_SIZE]), loss, MICRO_BATCH_SIZE))
