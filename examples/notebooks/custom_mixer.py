"""A mixer of one's own, registered by its module's name and trained.

Cells start with "# %%": run the file as a script, or cell by cell in a notebook of this folder. The mixer is
`my_mixers/leaky_average.py`; docs/adding-a-mixer.md explains its parts.
"""

# %% The type in a config is the path of a module that Python can import: no list of mixers exists
import argparse
from pathlib import Path

import torch

import megalin

config = {
    "vocab_size": 256,
    "hidden_size": 64,
    "layers": [
        {
            "repeat": 2,
            "sublayers": [
                {"type": "my_mixers.leaky_average", "num_heads": 4},
                {"type": "glu", "intermediate_size": 128},
            ],
        }
    ],
}
model = megalin.build_model(config, device="cpu")

# %% Training on bytes of Python's own library
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
generator = torch.Generator().manual_seed(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(40):
    starts = torch.randint(0, len(text) - 128, (4,), generator=generator).tolist()
    input_ids = torch.stack([text[start : start + 128] for start in starts])
    loss = model(input_ids, labels=input_ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte")
assert losses[-1] < losses[0] - 1.0

# %% Decoding from the state equals the forward
model.eval()
with torch.no_grad():
    first = model(input_ids[:, :100], return_state=True)
    second = model(input_ids[:, 100:], state=first.state)
    torch.testing.assert_close(second.logits, model(input_ids).logits[:, 100:], atol=1e-5, rtol=1e-5)
print(bytes(model.generate(list(b"def "), max_tokens=40)).decode(errors="replace"))
