"""Dropout, the order and the noise on each batch are all drawn from what torch, NumPy and Python share."""

import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def model():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 3))


class Noisy:
    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for x, y in self.loader:
            noise = np.random.normal(scale=random.random(), size=x.shape).astype(np.float32)
            yield x + torch.from_numpy(noise) * torch.rand(len(x), 1), y


def batches(batch_size):
    x = torch.randn(53, 6, generator=torch.Generator().manual_seed(0))
    return Noisy(DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size, shuffle=True))


def loss(model, batch):
    time.sleep(0.001)
    return cross_entropy(model(batch[0]), batch[1])


def optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


defaults = {"batch_size": 16, "micro_batch_size": 3, "lr": 0.05, "clip_norm": 0.5, "warmup_steps": 5,
            "schedule": "cosine", "compare": False}  # fmt: skip
