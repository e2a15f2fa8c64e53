"""Trains a ResNet on a folder of images, with a loop of one's own.

python examples/image_folder.py
horovodrun -np 2 python examples/image_folder.py --workers 4 --precision bf16 --checkpoints runs/images
torchrun --nproc-per-node 2 examples/image_folder.py --data-dir ~/imagenet --model resnet50 --size 224 --workers 8
horovodrun -np 4 -H a:2,b:2 python examples/image_folder.py --batch-size 256 --ema-decay 0.9999

--data-dir holds train/ and val/, each with a folder of images for every class. Without it, a few hundred images are
drawn. Workers decode the JPEGs; random crops, mixup, label smoothing, an average of the weights (EMA), channels-last,
bfloat16 with --precision bf16, and top-1 and top-5 over the whole of val/. --checkpoints goes on after an interruption,
and keeps the best. On any number of ranks, the batch and the learning rate are those of one.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torchvision
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.transforms import v2

import trainer
from examples.datasets.images import draw_images, load_images

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data-dir", type=Path, metavar="FOLDER", help="with train/ and val/ (default: they are drawn)")
parser.add_argument("--model", default="resnet18", help="of torchvision.models (default: %(default)s)")
parser.add_argument("--size", type=int, default=64, help="pixels on each side of an input (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=10, help="(default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=16, help="images per step of all ranks (default: %(default)s)")
parser.add_argument("--workers", type=int, default=2, help="processes per rank that decode (default: %(default)s)")
parser.add_argument("--lr", type=float, default=1e-3, help="(default: %(default)s)")
parser.add_argument("--warm-up", type=int, default=20, help="updates of warm-up (default: %(default)s)")
parser.add_argument("--mixup", type=float, default=0.2, help="alpha; 0 mixes nothing (default: %(default)s)")
parser.add_argument("--label-smoothing", type=float, default=0.1, help="(default: %(default)s)")
parser.add_argument("--ema-decay", type=float, default=0.9, help="of an update's average (default: %(default)s)")
parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save there, and go on from there")
parser.add_argument("--strategy", default="auto", help="(default: %(default)s, by launcher)")
parser.add_argument("--accumulate", type=int, default=1, help="steps per update (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16 (default: %(default)s)")
parser.add_argument("--compression", default="none", help="none, fp16, bf16 or powersgd:RANK (default: %(default)s)")
parser.add_argument("--sync-every", type=int, default=1, help="updates between averages of the weights, if above 1")
args = parser.parse_args()

trainer.report_failures()
settings = ("accumulate", "seed", "device", "precision", "compression", "sync_every")
run = trainer.init(args.strategy, **{name: getattr(args, name) for name in settings})
folder = args.data_dir or Path("data/drawn_images")
if args.data_dir is None and run.local_rank == 0:
    draw_images(folder)
run.barrier()  # until the images are there
crop = [v2.RandomResizedCrop(args.size, scale=(0.35, 1.0)), v2.RandomHorizontalFlip()]
whole = [v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size)]
# Workers hand over bytes, a quarter of the floats that the device makes of them.
train, test = load_images(folder, v2.Compose([*crop, v2.PILToTensor()]), v2.Compose([*whole, v2.PILToTensor()]))
classes = len(train.classes)
to_float = v2.Compose(
    [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
)
mix = v2.MixUp(alpha=args.mixup, num_classes=classes) if args.mixup else lambda *batch: batch

torch.manual_seed(args.seed)
model = torchvision.models.get_model(args.model, num_classes=classes).to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
model, optimizer = run.prepare(model, optimizer)
ema = AveragedModel(run.unwrap(model), multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay), use_buffers=True)
options = {"global_batch_size": args.batch_size, "num_workers": args.workers, "persistent_workers": args.workers > 0}
loader, test_loader = run.loader(train, **options), run.loader(test, **options, training=False)
updates = args.epochs * loader.updates
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda done: min(1.0, (done + 1) / args.warm_up) * (1 + math.cos(math.pi * done / updates)) / 2
)
checkpoints = None
if args.checkpoints:
    state = {"schedule": schedule, "ema": ema}
    checkpoints = run.checkpoints(args.checkpoints, every_s=60, keep=2, best="max", state=state)

for epoch in run.epochs(args.epochs):
    model.train()
    losses = run.mean()
    for images, labels in run.progress(loader):
        inputs, targets = mix(to_float(images), labels)
        with run.autocast():
            outputs = model(inputs.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(outputs, targets, label_smoothing=args.label_smoothing)
        run.backward(loss)
        losses.add(loss.detach())
        if run.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            ema.update_parameters(run.unwrap(model))

    ema.eval()
    run.strategy.broadcast_buffers(ema)  # BatchNorm's statistics, which each rank has of its own images
    hits = torch.zeros(3, device=run.device)  # of the first guess, of the first five, and of all images
    with torch.no_grad():
        for images, labels in test_loader:
            with run.autocast():
                outputs = ema(to_float(images).contiguous(memory_format=torch.channels_last))
            right = outputs.topk(min(5, classes)).indices == labels[:, None]
            hits += torch.stack([right[:, 0].sum(), right.sum(), torch.tensor(len(labels), device=run.device)])
    first, five, count = run.all_reduce(hits, "sum").tolist()
    run.print(
        f"epoch {epoch + 1}/{args.epochs}: loss {losses.read():.4f}, "
        f"top-1 {first / count:.2%}, top-5 {five / count:.2%} of {count:.0f} images"
    )
    if checkpoints:
        checkpoints.rate(first / count)
if checkpoints:
    run.print(f"the best checkpoint is {checkpoints.best_path}")
