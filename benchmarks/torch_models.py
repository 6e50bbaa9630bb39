"""Models of PyTorch for the benchmarks of training steps: MLPs of several sizes, ResNets, and a small GPT."""

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


class Bottleneck(torch.nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 beside a short cut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            *_normed(inputs, width, 1), torch.nn.ReLU(),
            *_normed(width, width, 3, stride), torch.nn.ReLU(),
            *_normed(width, 4 * width, 1),
        )  # fmt: skip
        is_same = stride == 1 and inputs == 4 * width
        self.short_cut = torch.nn.Sequential(*([] if is_same else _normed(inputs, 4 * width, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return torch.relu(self.body(x) + self.short_cut(x))


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> list[torch.nn.Module]:
    convolution = torch.nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return [convolution, torch.nn.BatchNorm2d(outputs)]


def resnet50(rows: int, seed: int) -> Case:
    """Return ResNet-50 for 1000 classes, on images of 64 x 64; the batch is of `seed`, the model is not."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [*_normed(3, 64, 7, 2), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for number in range(blocks):
            layers.append(Bottleneck(inputs, width, 1 if number else stride))
            inputs = 4 * width
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(inputs, 1000)]
    torch.manual_seed(1 + seed)
    return Case(torch.nn.Sequential(*layers), torch.randn(rows, 3, 64, 64), torch.randint(0, 1000, (rows,)))


class Transformer(torch.nn.Module):
    """Causal attention and an MLP, each behind a norm and beside a short cut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.taken, self.given = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        rows, length, width = x.shape
        parts = self.taken(self.first_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        found = torch.nn.functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.given(found.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.second_norm(x))


class Gpt(torch.nn.Module):
    """Tokens to the logits of the next ones, by one table for both."""

    def __init__(self, words: int, width: int, blocks: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(words, width), torch.nn.Embedding(length, width)
        torch.nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = torch.nn.Sequential(*(Transformer(width, heads) for _ in range(blocks)))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, a row for each token."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return (self.norm(self.blocks(x)) @ self.words.weight.t()).flatten(0, 1)


def gpt(rows: int, seed: int, words: int = 12288, width: int = 512, blocks: int = 6, length: int = 256) -> Case:
    """Return a GPT, 25 million parameters unless told otherwise; the batch is of `seed`, the model is not."""
    torch.manual_seed(0)
    model = Gpt(words, width, blocks, max(1, width // 64), length)
    torch.manual_seed(1 + seed)
    x, y = torch.randint(0, words, (2, rows, length))
    return Case(model, x, y.flatten())


#: On GPUs, by name: what makes the model and a rank's batch of its own.  The tiny one is for trials.
GPU_CASES: dict[str, Any] = {
    "resnet50": lambda rank: resnet50(32, rank),
    "gpt": lambda rank: gpt(8, rank),
    "tiny": lambda rank: gpt(2, rank, words=32, width=16, blocks=1, length=8),
}

#: By name: what makes the model and its batch, and after how many steps it is another contender's turn.
CASES: dict[str, tuple[Any, int]] = {
    "MLP, 150,000": (lambda: mlp([64, 256, 256, 256, 10], 32), 50),
    "MLP, 2.2 million": (lambda: mlp([128, 1024, 1024, 1024, 10], 32), 10),
    "ResNet-18, 11 million": (lambda: resnet18(8), 2),
    "MLP, 25 million": (lambda: mlp([256, 3500, 3500, 3500, 10], 4), 4),
}
