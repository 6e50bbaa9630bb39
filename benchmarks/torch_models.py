"""Models of PyTorch for the benchmarks of training steps: MLPs of several sizes, and ResNet-18 for 32 x 32 images."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """A model, and one rank's batch.

    Attributes
    ----------
    model : torch.nn.Module
    x, y : tensor
    """

    model: torch.nn.Module
    x: torch.Tensor
    y: torch.Tensor


def mlp(widths: list[int], rows: int) -> Case:
    """Return an MLP with ReLU between its layers."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return Case(torch.nn.Sequential(*layers[:-1]), torch.randn(rows, widths[0]), torch.randint(0, widths[-1], (rows,)))


class Block(torch.nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = torch.nn.BatchNorm2d(outputs)
        self.second = torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = torch.nn.BatchNorm2d(outputs)
        self.short_cut: torch.nn.Module = torch.nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short_cut = torch.nn.Sequential(
                torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False), torch.nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        found = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(found)) + self.short_cut(x))


def resnet18(rows: int) -> Case:
    """Return ResNet-18 with the first layer that small images get: 11 million parameters."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
    ]
    inputs = 64
    for outputs, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
    return Case(torch.nn.Sequential(*layers), torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,)))


#: By name: what makes the model and its batch, and after how many steps it is another contender's turn.
CASES: dict[str, tuple[Any, int]] = {
    "MLP, 150,000": (lambda: mlp([64, 256, 256, 256, 10], 32), 50),
    "MLP, 2.2 million": (lambda: mlp([128, 1024, 1024, 1024, 10], 32), 10),
    "ResNet-18, 11 million": (lambda: resnet18(8), 2),
    "MLP, 25 million": (lambda: mlp([256, 3500, 3500, 3500, 10], 4), 4),
}
