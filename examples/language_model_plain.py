"""A byte-level transformer, trained in plain PyTorch on one device. Read it beside language_model.py.

python examples/language_model_plain.py
python examples/language_model_plain.py --size 10m --bf16

AdamW with two parameter groups, a cosine schedule with warm-up, accumulation, clipping, bfloat16, torch.compile, and
an evaluation.
"""

from __future__ import annotations

import argparse
import math
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from examples.datasets.text import STANDARD_LIBRARY, load_text
from examples.transformer import SIZES, Transformer, parameter_groups

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--text", type=Path, default=STANDARD_LIBRARY, metavar="FOLDER", help="(default: Python's standard library)"
)
parser.add_argument("--bytes", type=int, help="read no more than so many (default: all)")
parser.add_argument("--length", type=int, default=256, help="bytes of a sample (default: %(default)s)")
parser.add_argument("--size", choices=SIZES, default="1m", help="millions of parameters (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=1, help="(default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=32, help="samples per step (default: %(default)s)")
parser.add_argument("--accumulate", type=int, default=1, help="steps per update (default: %(default)s)")
parser.add_argument("--lr", type=float, default=1e-3, help="(default: %(default)s)")
parser.add_argument("--warm-up", type=int, default=20, help="updates of warm-up (default: %(default)s)")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
parser.add_argument("--compile", action="store_true", help="run the model through torch.compile")
parser.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train, test = (TensorDataset(part.inputs, part.targets) for part in load_text(args.text, args.length, args.bytes))
model = Transformer(*SIZES[args.size], args.length).to(device)
if args.compile:
    model.compile()
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=args.lr, betas=(0.9, 0.95))
loader = DataLoader(train, args.batch_size, shuffle=args.shuffle)
test_loader = DataLoader(test, args.batch_size)
updates = args.epochs * -(-len(loader) // args.accumulate)
warm_up, cosine = LinearLR(optimizer, 0.1, total_iters=args.warm_up), CosineAnnealingLR(optimizer, updates)
schedule = SequentialLR(optimizer, [warm_up, cosine], [args.warm_up])

for epoch in range(args.epochs):
    model.train()
    batches = iter(loader)
    while update := list(islice(batches, args.accumulate)):
        samples = sum(len(inputs) for inputs, _ in update)
        for inputs, targets in update:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = model(inputs.to(device).long()).flatten(0, 1)
                loss = F.cross_entropy(logits, targets.to(device).long().flatten())
            (loss * len(inputs) / samples).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = model(inputs.to(device).long()).flatten(0, 1)
                total += F.cross_entropy(logits, targets.to(device).long().flatten(), reduction="sum").item()
            count += targets.numel()
    mean = total / count
    print(f"epoch {epoch + 1}/{args.epochs}: test loss {mean:.6f}, {mean / math.log(2):.3f} bits per byte")
