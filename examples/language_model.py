"""A byte-level transformer, trained with a loop of one's own. Read it beside language_model_plain.py.

python examples/language_model.py
horovodrun -np 2 python examples/language_model.py --size 10m --bf16
horovodrun -np 4 -H a:2,b:2 python examples/language_model.py --checkpoints runs/language-model
torchrun --nproc-per-node 2 examples/language_model.py --text ~/notes --compile

AdamW with two parameter groups, a cosine schedule with warm-up, accumulation, clipping, bfloat16, torch.compile,
checkpoints, and an evaluation. Any number of ranks ends with the losses of one. For a slow link, --compression and
--sync-every send less, and end with other losses.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import trainer
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
parser.add_argument("--batch-size", type=int, default=32, help="samples per step of all ranks (default: %(default)s)")
parser.add_argument("--accumulate", type=int, default=1, help="steps per update (default: %(default)s)")
parser.add_argument("--lr", type=float, default=1e-3, help="(default: %(default)s)")
parser.add_argument("--warm-up", type=int, default=20, help="updates of warm-up (default: %(default)s)")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
parser.add_argument("--compile", action="store_true", help="run the model through torch.compile")
parser.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--strategy", default="auto", help="(default: %(default)s, by launcher)")
parser.add_argument("--compression", default="none", help="none, fp16, bf16 or powersgd:RANK (default: %(default)s)")
parser.add_argument("--sync-every", type=int, default=1, help="updates between averages of the weights, if above 1")
parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save there, and go on from there")
args = parser.parse_args()

trainer.report_failures()
precision = "bf16" if args.bf16 else "fp32"
run = trainer.init(
    args.strategy,
    accumulate=args.accumulate,
    compression=args.compression,
    sync_every=args.sync_every,
    precision=precision,
    compile=args.compile,
)
torch.manual_seed(0)
train, test = load_text(args.text, args.length, args.bytes)
model = Transformer(*SIZES[args.size], args.length)
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=args.lr, betas=(0.9, 0.95))
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(train, global_batch_size=args.batch_size, shuffle=args.shuffle)
test_loader = run.loader(test, global_batch_size=args.batch_size, training=False)
updates = args.epochs * loader.updates
warm_up, cosine = LinearLR(optimizer, 0.1, total_iters=args.warm_up), CosineAnnealingLR(optimizer, updates)
schedule = SequentialLR(optimizer, [warm_up, cosine], [args.warm_up])
if args.checkpoints:
    run.checkpoints(args.checkpoints, state={"schedule": schedule})

for epoch in run.epochs(args.epochs):
    model.train()
    for inputs, targets in run.progress(loader):
        with run.autocast():
            loss = F.cross_entropy(model(inputs.long()).flatten(0, 1), targets.long().flatten())
        run.backward(loss)
        if run.sync_gradients:
            run.clip_grad_norm_(model, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            with run.autocast():
                logits = model(inputs.long()).flatten(0, 1)
                total += F.cross_entropy(logits, targets.long().flatten(), reduction="sum").item()
            count += targets.numel()
    mean = run.all_reduce(total, "sum").item() / int(run.all_reduce(count, "sum"))
    run.print(f"epoch {epoch + 1}/{args.epochs}: test loss {mean:.6f}, {mean / math.log(2):.3f} bits per byte")
