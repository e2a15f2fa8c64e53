"""Trains a small convolutional network on MNIST. Read it beside mnist_plain.py, the same training by hand.

python examples/mnist.py                                   # one process
horovodrun -np 2 python examples/mnist.py                  # two, through Horovod
horovodrun -np 4 -H a:2,b:2 python examples/mnist.py       # four, on two machines
torchrun --nproc-per-node 2 examples/mnist.py              # two, through torch.distributed

MNIST is read from --data-dir or downloaded. If neither works, the UCI digits take its place, with a warning.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.nn import functional as F

import trainer
from examples.datasets import DATASETS, load_dataset
from examples.networks import NETWORKS
from examples.strategies import STRATEGIES, full_name
from trainer.strategies import NAMES

parser = argparse.ArgumentParser(
    usage="%(prog)s …", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
)
add = parser.add_argument
add("--epochs", type=int, default=1, metavar="N", help="(default: %(default)s)")
add("--batch-size", type=int, metavar="N", help="per rank (default: 64 of all ranks)")
add("--accumulate", type=int, default=1, metavar="N", help="batches per update (default: %(default)s)")
add("--lr", type=float, default=0.1, help="with --batch-size, for one rank (default: %(default)s)")
add("--momentum", type=float, default=0.9, metavar="M", help="of SGD (default: %(default)s)")
add("--warmup-epochs", type=float, default=0.25, metavar="X", help="from rate 0 (default: %(default)s)")
add("--decay", default="cosine", metavar="none|cosine", help="of the rate, afterwards (default: %(default)s)")
add("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
add("--network", choices=NETWORKS, default="default", help="large: 25 MB (default: %(default)s)")
add("--dataset", default="auto", metavar="|".join(DATASETS), help="auto: MNIST if it can be had (default: %(default)s)")
add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="holds MNIST/raw (default: %(default)s)")
add("--strategy", default="auto", metavar="|".join((*NAMES, *STRATEGIES)), help="(default: %(default)s, by launcher)")
add("--device", default="auto", metavar="auto|cpu|cuda", help="(default: %(default)s)")
add("--precision", default="fp32", metavar="fp32|bf16|fp16", help="of the forward pass (default: %(default)s)")
add("--no-channels-last", dest="channels_last", action="store_false", help="keep images as the dataset has them")
add("--compile", action="store_true", help="run the model through torch.compile")
add("--compression", default="none", metavar="none|fp16|bf16|powersgd:RANK", help="of gradients (default: %(default)s)")
add("--sync-every", type=int, default=1, metavar="N", help="updates between exchanges (default: %(default)s)")
add("--checkpoint", metavar="DIR", help="save there, and go on from there")
add("--checkpoint-every", type=float, default=60.0, metavar="S", help="seconds (default: %(default).0f)")
add("--output", default="auto", metavar="DIR", help="of the run's record, or none (default: in runs/)")
add("--target-accuracy", type=float, metavar="PERCENT", help="end with code 1 below it")

trainer.report_failures()
args = parser.parse_args()
if not 0 < args.lr < math.inf:
    raise trainer.ConfigError(f"lr is {args.lr}; it must be finite and positive")
if not 0 <= args.momentum < 1:
    raise trainer.ConfigError(f"momentum is {args.momentum}; it must be at least 0 and below 1")
# The recipe is for a global batch of 64, on any number of ranks. --batch-size lets batch and rate grow with them.
names = "accumulate warmup_epochs decay seed device precision channels_last compile compression sync_every"
options = {name: getattr(args, name) for name in names.split()}
options |= {"global_batch_size": 64} if args.batch_size is None else {"batch_size": args.batch_size}
config = trainer.TrainerConfig(eval_batch_size=max(1000, args.batch_size or 0), **options)
folder = args.checkpoint
checkpoint = trainer.CheckpointConfig(folder=folder, every_s=args.checkpoint_every) if folder is not None else None

run = trainer.init(full_name(args.strategy), config=config)
train, test = load_dataset(args.dataset, args.data_dir, run.world, run.all_gather)
torch.manual_seed(args.seed)
model = NETWORKS[args.network]()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

records = trainer.Trainer(
    model,
    optimizer,
    F.cross_entropy,
    run=run,
    metrics={"accuracy": trainer.accuracy},
    output=None if args.output == "none" else args.output,
    checkpoint=checkpoint,
).fit(train, test, epochs=args.epochs)

validation = records[-1].validation
assert validation is not None  # noqa: S101 (fit was given one)
accuracy = 100 * validation.metrics["accuracy"]
run.print(f"test accuracy {accuracy:.2f} % (evaluated {validation.evaluated}/{validation.samples})")
if args.target_accuracy is not None and accuracy < args.target_accuracy:
    raise trainer.TrainerError(f"test accuracy {accuracy:.2f} % is below the target of {args.target_accuracy} %")
