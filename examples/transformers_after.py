"""Trains a small GPT-2 of Hugging Face on padded texts, with gradient accumulation.

Four lines differ from transformers_before.py, which trains on the full batches. Their losses agree up to rounding.
"""

from pydoc_data.topics import topics

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from bigbatch.torch import Accumulator, weights

torch.manual_seed(0)
sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)


def collate(texts):
    rows = [torch.tensor(list(text.encode()[:64])) for text in texts]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    ids = pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


texts = [part for text in topics.values() for part in text.split("\n") if part.strip()][:400]
loader = DataLoader(texts, batch_size=50, collate_fn=collate)

accumulator = Accumulator(model, optimizer, lambda model, batch: model(**batch), 8, weight=weights.causal_lm_tokens)
for batch in loader:
    step = accumulator.step(batch)
    print(f"loss {step.loss:.4f}")
