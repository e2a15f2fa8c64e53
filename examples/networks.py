"""Networks for MNIST's images, for mnist.py and mnist_plain.py."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class DefaultNetwork(nn.Module):
    """Two convolutions with BatchNorm and two linear layers, 97,000 parameters: 99 % within one epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=5, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 4 * 4, 160), nn.ReLU(), nn.Linear(160, 10)
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
