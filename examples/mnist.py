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
parser.add_argument("--epochs", type=int, default=1, metavar="N", help="(default: %(default)s)")
parser.add_argument("--batch-size", dest="per_rank", type=int, metavar="N", help="per rank (default: 64 of all ranks)")
parser.add_argument("--lr", type=float, default=0.1, help="with --batch-size, for one rank (default: %(default)s)")
parser.add_argument("--momentum", type=float, default=0.9, metavar="M", help="of SGD (default: %(default)s)")
parser.add_argument("--network", choices=NETWORKS, default="default", help="large: 25 MB (default: %(default)s)")
parser.add_argument(
    "--dataset", default="auto", metavar="|".join(DATASETS), help="auto: MNIST if it can be had (default: %(default)s)"
)
parser.add_argument(
    "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="holds MNIST/raw (default: %(default)s)"
)
parser.add_argument(
    "--strategy", default="auto", metavar="|".join((*NAMES, *STRATEGIES)), help="(default: %(default)s, by launcher)"
)
parser.add_argument("--output", default="auto", metavar="DIR", help="of the run's record, or none (default: in runs/)")
parser.add_argument("--tensorboard", action="store_true", help="write TensorBoard events there, too")
parser.add_argument("--target-accuracy", type=float, metavar="PERCENT", help="end with code 1 below it")
parser.add_argument("--checkpoint-every", default="60s", metavar="30s|200|1epoch", help="(default: 60s)")
trainer.add_options(parser, trainer.TrainerConfig, log_every_s="--log-every", batch_size=None, global_batch_size=None)
trainer.add_options(
    parser, trainer.CheckpointConfig, folder="--checkpoint", every_s=None, every_updates=None, every_epochs=None
)
parser.set_defaults(warmup_epochs=0.25, channels_last=True)

trainer.report_failures()
args = parser.parse_args()
# The recipe is for a global batch of 64, on any number of ranks. --batch-size lets batch and rate grow with them.
size = {"global_batch_size": 64} if args.per_rank is None else {"batch_size": args.per_rank}
evaluation_batch = args.eval_batch_size or max(1000, args.per_rank or 0)
config = trainer.from_options(trainer.TrainerConfig, args, eval_batch_size=evaluation_batch, **size)
every = trainer.parse_interval(args.checkpoint_every)
checkpoint = trainer.from_options(trainer.CheckpointConfig, args, **every) if args.folder is not None else None
if not 0 < args.lr < math.inf:
    raise trainer.ConfigError(f"lr is {args.lr}; it must be finite and positive")
if not 0 <= args.momentum < 1:
    raise trainer.ConfigError(f"momentum is {args.momentum}; it must be at least 0 and below 1")
if args.tensorboard and args.output == "none":
    raise trainer.ConfigError("tensorboard needs a folder to write to, and output is 'none'")

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
    tensorboard=args.tensorboard,
    checkpoint=checkpoint,
).fit(train, test, epochs=args.epochs)

validation = records[-1].validation
assert validation is not None  # noqa: S101 (fit was given one)
accuracy = 100 * validation.metrics["accuracy"]
run.print(f"test accuracy {accuracy:.2f} % (evaluated {validation.evaluated}/{validation.samples})")
if args.target_accuracy is not None and accuracy < args.target_accuracy:
    raise trainer.TrainerError(f"test accuracy {accuracy:.2f} % is below the target of {args.target_accuracy} %")
