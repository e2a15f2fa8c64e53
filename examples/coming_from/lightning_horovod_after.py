"""The same with trainer: horovodrun -np 2 python examples/coming_from/lightning_horovod_after.py."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import trainer


class Losses(trainer.Callback):
    def on_epoch_end(self, context: trainer.FitContext, record: trainer.EpochRecord) -> None:
        if context.world.is_root:
            print(f"epoch {record.epoch - 1}: loss {record.train_loss:.8f}")


torch.manual_seed(0)
data = torch.randn(1200, 20)
dataset = TensorDataset(data, (data @ torch.randn(20, 3)).argmax(1))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
config = trainer.TrainerConfig(batch_size=50, warmup_epochs=0, decay="none")
trainer.Trainer(model, optimizer, F.cross_entropy, config=config, callbacks=[Losses()], output=None).fit(
    dataset, epochs=2
)
