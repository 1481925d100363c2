"""Trains a classifier of handwritten digits with Muon, AdamW and two schedules, with gradient accumulation.

Six lines differ from torch_before.py, which trains on the full batches. Both print the same numbers.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from bigbatch.torch import Accumulator

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
images, classes = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16), torch.tensor(classes))
loader = DataLoader(data, batch_size=250, shuffle=True)

model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
criterion = nn.CrossEntropyLoss()
muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.02)
optimizers = [muon, adamw]
schedulers = [LinearLR(optimizer, 1.0, 0.1, total_iters=64) for optimizer in optimizers]


def loss(model, batch):
    x, y = batch
    logits = model(x)
    return criterion(logits, y), {"correct": (logits.argmax(dim=1) == y).sum()}


accumulator = Accumulator(model, optimizers, loss, micro_batch_size=32, has_aux=True, scheduler=schedulers)
for epoch in range(8):
    num_correct = 0
    for batch in loader:
        step = accumulator.step(batch)
        num_correct += step.aux["correct"]
    print(f"epoch {epoch + 1}: accuracy {num_correct / len(data):.2%}")
