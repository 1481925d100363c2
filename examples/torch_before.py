"""Trains a classifier of handwritten digits with Muon, AdamW and two schedules, on batches that fit into memory.

torch_after.py is the same script with gradient accumulation.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

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

for epoch in range(8):
    num_correct = 0
    for batch in loader:
        x, y = batch
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        num_correct += (logits.argmax(dim=1) == y).sum().item()
    print(f"epoch {epoch + 1}: accuracy {num_correct / len(data):.2%}")
