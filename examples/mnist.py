"""Trains a small convolutional network on MNIST, on as many processes as it is launched with.

python examples/mnist.py                                   # one process
horovodrun -np 2 python examples/mnist.py                  # two, through Horovod
horovodrun -np 4 -H a:2,b:2 python examples/mnist.py       # four, on two machines
torchrun --nproc-per-node 2 examples/mnist.py              # two, through torch.distributed
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer
from examples.datasets import DATASETS, load_dataset
from trainer.config import COMPRESSIONS, DECAYS, DEVICES, PRECISIONS, REDUCTIONS
from trainer.strategies import NAMES as STRATEGIES


class DefaultNetwork(nn.Module):
    """Two convolutions and two linear layers, 97,000 parameters: 99 % within five epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 160), nn.ReLU(), nn.Linear(160, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images (samples, 1, 28, 28) to logits (samples, 10)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


class TutorialNetwork(nn.Module):
    """The 21,840 parameters of the network in Horovod's own MNIST example, for fair comparisons."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (samples, 1, 28, 28) to logits (samples, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(F.dropout2d(self.conv2(x), training=self.training), 2))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return self.fc2(x)  # type: ignore[no-any-return]  # nn.Module's call is untyped


class LargeNetwork(nn.Sequential):
    """Three linear layers, 6.35 million parameters, 25 MB of gradients, so that the all-reduce dominates."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2304), nn.ReLU(), nn.Linear(2304, 10)
        )


NETWORKS = {"default": DefaultNetwork, "tutorial": TutorialNetwork, "large": LargeNetwork}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--help` shows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _add_training(parser)
    _add_data(parser)
    _add_processes(parser)
    _add_checkpoints(parser)
    _add_result(parser)
    return parser.parse_args(arguments)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=int, default=5, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--batch-size", type=int, default=100, metavar="N", help="samples per rank and step (default: %(default)s)"
    )
    group.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="steps whose gradients form one update (default: %(default)s)",
    )
    scaled = "scaled with the world size and warmed up over the first epoch"
    group.add_argument(
        "--lr", type=float, metavar="LR", help=f"rate for one rank; {scaled} (default: 0.05, for few samples 0.01)"
    )
    group.add_argument("--momentum", type=float, default=0.9, metavar="M", help="of SGD (default: %(default)s)")
    group.add_argument(
        "--decay",
        default="cosine",
        metavar="|".join(DECAYS),
        help="of the learning rate, after the warm-up (default: %(default)s)",
    )
    group.add_argument("--clip-norm", type=float, metavar="X", help="largest norm of the gradient (default: none)")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights, order and dropout (default: %(default)s)"
    )
    group.add_argument(
        "--network",
        default="default",
        metavar="|".join(NETWORKS),
        help="tutorial is that of Horovod's own example, large has 25 MB of gradients (default: %(default)s)",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        default="auto",
        metavar="|".join(DATASETS),
        help="auto: MNIST from --data-dir, else downloaded, else, with a warning, scikit-learn's UCI "
        "digits; mnist: never anything else (default: %(default)s)",
    )
    group.add_argument(
        "--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="holds MNIST/raw with the four IDX files, plain or .gz (default: %(default)s)",
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes and devices")
    group.add_argument(
        "--strategy",
        default="auto",
        metavar="|".join(STRATEGIES),
        help="gradient synchronization; auto chooses by launcher (default: %(default)s)",
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="|".join(DEVICES),
        help="auto takes a GPU where there is one (default: %(default)s)",
    )
    group.add_argument(
        "--precision", default="fp32", metavar="|".join(PRECISIONS), help="of the forward pass (default: %(default)s)"
    )
    group.add_argument(
        "--compression",
        default="none",
        metavar="|".join(COMPRESSIONS),
        help="of the gradients that are sent (default: %(default)s)",
    )
    group.add_argument(
        "--sync-every", type=int, default=1, metavar="N", help="updates of each rank by itself (default: %(default)s)"
    )
    group.add_argument("--sync-overlap", action="store_true", help="send a round's weights during the next one")
    group.add_argument(
        "--reduction",
        default="average",
        metavar="|".join(REDUCTIONS),
        help="of gradients over ranks (default: %(default)s)",
    )
    group.add_argument("--sync-batch-norm", action="store_true", help="normalize over the global batch")
    group.add_argument("--compile", action="store_true", help="run the network through torch.compile")
    group.add_argument("--channels-last", action="store_true", help="keep images and weights in NHWC order")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="save the training there, on each host (default: not at all)"
    )
    group.add_argument(
        "--checkpoint-every",
        default="60s",
        metavar="30s|200|1epoch",
        help="seconds, updates or epochs between two checkpoints (default: %(default)s)",
    )
    group.add_argument("--keep", type=int, default=3, metavar="N", help="newest checkpoints (default: %(default)s)")
    group.add_argument(
        "--resume",
        default="auto",
        metavar="auto|none|PATH",
        help="auto goes on from the newest checkpoint in DIR, none asks for an empty DIR, PATH is a checkpoint to go "
        "on from (default: %(default)s)",
    )


def _add_result(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--target-accuracy", type=float, metavar="PERCENT", help="exit with code 1 when the last test accuracy is below"
    )
    group.add_argument(
        "--output",
        default="auto",
        metavar="DIR",
        help="the run's record; auto makes a new folder under runs/, none leaves no record (default: %(default)s)",
    )
    group.add_argument("--tensorboard", action="store_true", help="write TensorBoard events there, too")
    group.add_argument(
        "--log-every",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between progress lines where there is no terminal (default: %(default)s)",
    )


def make_config(args: argparse.Namespace) -> trainer.TrainerConfig:
    """Convert the command line to the library's settings."""
    return trainer.TrainerConfig(
        batch_size=args.batch_size,
        eval_batch_size=max(1000, args.batch_size),
        accumulate=args.accumulate,
        precision=args.precision,
        compression=args.compression,
        sync_every=args.sync_every,
        sync_overlap=args.sync_overlap,
        reduction=args.reduction,
        clip_norm=args.clip_norm,
        decay=args.decay,
        seed=args.seed,
        sync_batch_norm=args.sync_batch_norm,
        channels_last=args.channels_last,
        compile=args.compile,
        device=args.device,
        log_every_s=args.log_every,
    )


def make_checkpoint_config(args: argparse.Namespace) -> trainer.CheckpointConfig | None:
    """Convert the command line to the library's settings; None where nothing is to be saved."""
    every = trainer.parse_interval(args.checkpoint_every)
    if args.checkpoint is None:
        return None
    return trainer.CheckpointConfig(folder=args.checkpoint, keep=args.keep, resume=args.resume, **every)


def main() -> int:
    trainer.report_failures()
    args = parse_args()
    config, checkpoint = make_config(args), make_checkpoint_config(args)
    if args.network not in NETWORKS:
        raise trainer.ConfigError(f"network is {args.network!r}; valid are {', '.join(NETWORKS)}")
    if args.lr is not None and not 0 < args.lr < math.inf:
        raise trainer.ConfigError(f"lr is {args.lr}; it must be finite and positive")
    if args.tensorboard and args.output == "none":
        raise trainer.ConfigError("tensorboard needs a folder to write to, and output is 'none'")
    if not 0 <= args.momentum < 1:
        raise trainer.ConfigError(f"momentum is {args.momentum}; it must be at least 0 and below 1")

    run = trainer.init(args.strategy, device=args.device)
    train, test = load_dataset(args.dataset, args.data_dir, run.world, run.all_gather)
    # An epoch of the UCI digits is a few updates, too short a warm-up for MNIST's rate on four ranks.
    lr = args.lr or (0.05 if len(train) > 10_000 else 0.01)
    torch.manual_seed(args.seed)
    model = NETWORKS[args.network]()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)

    records = trainer.Trainer(
        model,
        optimizer,
        F.cross_entropy,
        strategy=run.strategy,
        config=config,
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
