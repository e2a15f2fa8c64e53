"""A training with Lightning below 2.0: horovodrun -np 2 python examples/coming_from/lightning_horovod_before.py."""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Losses(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}: loss {trainer.callback_metrics['loss']:.8f}")


torch.manual_seed(0)
data = torch.randn(1200, 20)
dataset = TensorDataset(data, (data @ torch.randn(20, 3)).argmax(1))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
loader = DataLoader(dataset, batch_size=50, shuffle=True)
pl.Trainer(strategy="horovod", max_epochs=2, callbacks=[Losses()]).fit(Classifier(model), loader)
