"""Trains with Trainer's own learning rate, and prints which ones all ranks have stepped with; for test_checkpoints.py.

job_with_a_rate.py FOLDER EPOCHS LR
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import trainer

folder, epochs, rate = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
data = trainer.InMemory(torch.randn(120, 4), torch.randint(3, (120,)))
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
fitted = trainer.Trainer(
    model,
    optimizer,
    F.cross_entropy,
    config=trainer.TrainerConfig(batch_size=10, decay="none", device="cpu"),
    checkpoint=trainer.CheckpointConfig(folder=folder, every_epochs=1, best="min"),
    output=None,
)
rates: list[float] = []
optimizer.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
records = fitted.fit(data, data, epochs=epochs)
assert records[-1].learning_rate == rates[-1]
assert fitted.checkpoints is not None
paths = (str(fitted.checkpoints.newest_path), str(fitted.checkpoints.best_path))
by_rank = fitted.run.all_gather((rates, paths))
assert by_rank == [by_rank[0]] * fitted.world.size
fitted.run.print(f"{fitted.world.size} ranks have trained with {', '.join(f'{one:.4g}' for one in rates)}")
