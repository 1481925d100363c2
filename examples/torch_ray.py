"""Trains on handwritten digits with two workers of Ray Train. One worker has twice the data of the other.

Each worker cuts its own batches into micro-batches, and gradients are reduced once per step. A worker without data
takes part in the steps of the other. The weights are those of one process that trains on all batches.
"""

import os
import tempfile
from itertools import zip_longest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # how often Ray fetches reports; by default every 2 s

import ray
import torch
import torch.nn.functional as F
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bigbatch import History
from bigbatch.torch import Accumulator

BATCH_SIZE, MICRO_BATCH_SIZE, EPOCHS = 192, 32, 15
SHARES = [1000, 500]  # how many digits each worker has; the other 297 are held out
Batch = tuple[Tensor, Tensor]


def digits() -> Batch:
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16.0)[order], torch.tensor(classes)[order]  # in float64 any difference is rounding


def batches_of(rank: int) -> list[Batch]:
    start = sum(SHARES[:rank])
    x, y = (part[start : start + SHARES[rank]].split(BATCH_SIZE) for part in digits())
    return list(zip(x, y, strict=True))  # six for one worker, three for the other; the last of each is short


def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train_worker() -> None:
    rank = train.get_context().get_world_rank()
    batches = batches_of(rank)
    model, optimizer = begin()
    model = prepare_model(model)  # a DistributedDataParallel with the same parameters
    accumulator = Accumulator(model, optimizer, loss, micro_batch_size=MICRO_BATCH_SIZE)
    history = History()
    for _ in range(EPOCHS):
        for batch in batches:
            step = accumulator.step(batch)
            history.append(step)
        accumulator.flush()  # on every worker: takes part in the steps of workers that still have data
        history.end_epoch()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
            train.report({"loss": history.losses[-1]}, checkpoint=train.Checkpoint.from_directory(folder))


def train_alone() -> nn.Module:
    """The plain loop in one process, without bigbatch and Ray."""
    model, optimizer = begin()
    shares = [batches_of(rank) for rank in range(len(SHARES))]
    for _ in range(EPOCHS):
        for parts in zip_longest(*shares):
            optimizer.zero_grad()
            x, y = map(torch.cat, zip(*filter(None, parts), strict=True))  # the batches of all workers as one
            loss(model, (x, y)).backward()
            optimizer.step()
    return model


ray.init("local", num_cpus=len(SHARES), object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
with tempfile.TemporaryDirectory() as folder:
    scaling = train.ScalingConfig(num_workers=len(SHARES), use_gpu=False)
    result = TorchTrainer(train_worker, scaling_config=scaling, run_config=train.RunConfig(storage_path=folder)).fit()
    weights = [torch.load(f"{result.checkpoint.path}/{rank}.pt") for rank in range(len(SHARES))]
ray.shutdown()

for epoch, value in enumerate(result.metrics_dataframe["loss"], 1):
    print(f"epoch {epoch:2}: loss {value:.4f}")
model = train_alone()
gap = max(((ours[name] - w).norm() / w.norm()).item() for name, w in model.state_dict().items() for ours in weights)
model.load_state_dict(weights[0])
x_test, y_test = (part[sum(SHARES) :] for part in digits())
accuracy = (model(x_test).argmax(1) == y_test).double().mean().item()
print(f"the weights are {gap:.1e} apart, relative; accuracy on held-out digits: {accuracy:.1%}")
