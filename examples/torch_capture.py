"""Trains on Python's help texts, byte by byte. The batch stays in host memory; on a GPU, passes become CUDA graphs.

Rows have different lengths, so the loss is a mean over bytes, and `weight` returns the number of bytes.
"""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.torch import Accumulator

LENGTH, WIDTH, STEPS, IGNORED = 64, 64, 30, -100
device = "cuda" if torch.cuda.is_available() else "cpu"

texts = [text.encode()[start:][: LENGTH + 1] for text in topics.values() for start in range(0, len(text), LENGTH)]
rows = torch.zeros(len(texts), LENGTH + 1, dtype=torch.long)
is_text = torch.zeros(len(texts), LENGTH + 1, dtype=torch.bool)
for number, text in enumerate(texts):
    rows[number, : len(text)] = torch.tensor(list(text))
    is_text[number, : len(text)] = True
inputs, targets = rows[:, :-1], rows[:, 1:].masked_fill(~is_text[:, 1:], IGNORED)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 8)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.pad(self.embed(x).transpose(1, 2), (7, 0))  # each byte sees itself and the seven before it
        return self.head(F.gelu(self.mix(seen)).transpose(1, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


torch.manual_seed(0)
model = Model().to(device)
accumulator = Accumulator(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),  # skips a bad step by itself: the host never waits
    loss,
    micro_batch_size=64,
    weight=lambda batch: (batch[1] != IGNORED).sum(),
    capture="auto",
)
steps = [accumulator.step((inputs[chosen], targets[chosen])) for chosen in torch.randint(len(rows), (STEPS, 500))]
first, last = steps[0], steps[-1]
print(f"on {device}: {last.num_micro_batches} micro-batches a step, the last of {500 % 64} rows")
print(f"loss of a byte: {first.loss:.2f} at first, {last.loss:.2f} after {STEPS} steps of {last.weight} bytes or so")
