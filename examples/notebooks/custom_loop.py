"""A training loop in plain PyTorch: a model of megalin, then ops of megalin in a model of one's own.

Cells start with "# %%": run the file as a script, or cell by cell in an editor or notebook.
"""

# %% Text as bytes: a file of Python's own library
import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import megalin
from megalin import ops

device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list(Path(argparse.__file__).read_bytes()), device=device)
generator = torch.Generator().manual_seed(0)


def sample(batch_size: int = 4, length: int = 64) -> Tensor:
    """Random windows of the text, [B, T] int64."""
    starts = torch.randint(0, len(text) - length, (batch_size,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()])


# %% A preset with another vocabulary, trained by an ordinary optimizer
model = megalin.build_model({"preset": "hgrn2-tiny", "vocab_size": 256}, device=device)
print(f"{model.num_parameters():,} parameters")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(30):
    input_ids = sample()
    loss = model(input_ids, labels=input_ids, return_logits=False).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f} nats a byte")
assert losses[-1] < losses[0] - 1.0

# %% The state carries a sequence on: any length, constant memory
model.eval()
with torch.no_grad():
    whole = model(input_ids)
    first = model(input_ids[:, :40], return_state=True)
    second = model(input_ids[:, 40:], state=first.state)
torch.testing.assert_close(second.logits, whole.logits[:, 40:], atol=1e-5, rtol=1e-5)
print(bytes(model.generate(list(b"def "), max_tokens=40)).decode(errors="replace"))


# %% Ops alone, in a layer that knows nothing else of megalin
class GatedRecurrence(nn.Module):
    """A recurrence whose decay depends on the token (GLA, HGRN2): S_t = diag(exp(g_t)) S_t-1 + k_t v_t^T."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.inputs, self.output = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        normed = ops.rms_norm(x, self.weight, eps=1e-6)
        q, k, v, gate = self.inputs(normed).unflatten(-1, (4, self.num_heads, -1)).unbind(2)
        log_decay = functional.logsigmoid(gate.float() + 3.0)  # <= 0, at least fp32
        scan = ops.vector_decay_scan(q, k, v, log_decay, scale=q.shape[-1] ** -0.5)
        return x + self.output(scan.output.flatten(2))


mine = nn.Sequential(nn.Embedding(256, 64), GatedRecurrence(64, 4), GatedRecurrence(64, 4), nn.Linear(64, 256))
mine = mine.to(device)
optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
losses = []
for _ in range(30):
    input_ids = sample()
    loss = functional.cross_entropy(mine(input_ids)[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"own model: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0] - 1.0
