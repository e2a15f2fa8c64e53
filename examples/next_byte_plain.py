"""A transformer that predicts the next byte, in plain PyTorch on one device. Read it beside next_byte.py.

python examples/next_byte_plain.py

AdamW with two parameter groups, a cosine schedule with warm-up, accumulation, clipping, bfloat16, batches that are
dicts from a collate function, a loss that is a mean over tokens, and an evaluation.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

from examples.datasets.text import SOME_TEXT, count_tokens, load_lines, pad
from examples.transformer import Transformer, parameter_groups

ACCUMULATE = 4
WARM_UP = 5

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--text", type=Path, nargs="+", default=SOME_TEXT, metavar="FILE", help="(default: LICENSE and README.md)"
)
parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=8, help="lines per step (default: %(default)s)")
parser.add_argument("--lr", type=float, default=3e-3, help="(default: %(default)s)")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
parser.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train, test = load_lines(args.text)
model = Transformer().to(device)
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=args.lr, betas=(0.9, 0.95))
loader = DataLoader(train, args.batch_size, shuffle=args.shuffle, collate_fn=pad)
test_loader = DataLoader(test, args.batch_size, collate_fn=pad)
updates = args.epochs * -(-len(loader) // ACCUMULATE)
warm_up, cosine = LinearLR(optimizer, 0.1, total_iters=WARM_UP), CosineAnnealingLR(optimizer, updates - WARM_UP)
schedule = SequentialLR(optimizer, [warm_up, cosine], [WARM_UP])

for epoch in range(args.epochs):
    model.train()
    batches = iter(loader)
    while update := list(islice(batches, ACCUMULATE)):
        tokens = sum(count_tokens(batch) for batch in update)
        for batch in update:
            inputs, targets = batch["inputs"].to(device), batch["targets"].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss * count_tokens(batch) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in test_loader:
            inputs, targets = batch["inputs"].to(device), batch["targets"].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
            total, tokens = total + loss.item(), tokens + count_tokens(batch)
    print(f"epoch {epoch + 1}/{args.epochs}: test loss {total / tokens:.6f} over {tokens} tokens")
