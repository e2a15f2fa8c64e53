"""A transformer that predicts the next byte, with a loop of one's own. Read it beside next_byte_plain.py.

python examples/next_byte.py
horovodrun -np 2 python examples/next_byte.py
horovodrun -np 4 -H a:2,b:2 python examples/next_byte.py

AdamW with two parameter groups, a cosine schedule with warm-up, accumulation, clipping, bfloat16, batches that are
dicts from a collate function, a loss that is a mean over tokens, and an evaluation. Any number of ranks ends with the
losses of one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import trainer
from examples.datasets.text import SOME_TEXT, count_tokens, load_lines, pad
from examples.transformer import Transformer, parameter_groups

ACCUMULATE = 4
WARM_UP = 5

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--text", type=Path, nargs="+", default=SOME_TEXT, metavar="FILE", help="(default: LICENSE and README.md)"
)
parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=8, help="lines per step of all ranks (default: %(default)s)")
parser.add_argument("--lr", type=float, default=3e-3, help="(default: %(default)s)")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
parser.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--strategy", default="auto", help="(default: %(default)s, by launcher)")
args = parser.parse_args()

trainer.report_failures()
run = trainer.init(args.strategy, accumulate=ACCUMULATE, precision="bf16" if args.bf16 else "fp32")
torch.manual_seed(0)
train, test = load_lines(args.text)
model = Transformer()
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=args.lr, betas=(0.9, 0.95))
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(
    train, global_batch_size=args.batch_size, shuffle=args.shuffle, collate_fn=pad, weigh_by=count_tokens
)
test_loader = run.loader(test, global_batch_size=args.batch_size, training=False, collate_fn=pad)
updates = args.epochs * loader.updates
warm_up, cosine = LinearLR(optimizer, 0.1, total_iters=WARM_UP), CosineAnnealingLR(optimizer, updates - WARM_UP)
schedule = SequentialLR(optimizer, [warm_up, cosine], [WARM_UP])

for epoch in run.epochs(args.epochs):
    model.train()
    for batch in loader:
        with run.autocast():
            loss = F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
        run.backward(loss)
        if run.sync_gradients:
            run.clip_grad_norm_(model, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in test_loader:
            with run.autocast():
                logits = model(batch["inputs"])
                loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
            total, tokens = total + loss.item(), tokens + count_tokens(batch)
    total, tokens = run.all_reduce(total, "sum").item(), int(run.all_reduce(tokens, "sum"))
    run.print(f"epoch {epoch + 1}/{args.epochs}: test loss {total / tokens:.6f} over {tokens} tokens")
