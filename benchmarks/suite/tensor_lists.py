"""The gradient lists of real models: shapes in the order in which the model has its parameters, made from its build."""

from __future__ import annotations

from collections.abc import Callable, Iterator

Shape = tuple[int, ...]


def shapes_of(model: str) -> list[Shape]:
    """Return the shapes of a model's parameters; the known models are `MODELS`.  Local."""
    return list(MODELS[model]())


def resnet50() -> Iterator[Shape]:
    """Yield ResNet-50's (He et al., 2015), 1000 classes: convolutions, each with two vectors of its normalization."""
    yield from _convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = 4 * width
        for block in range(blocks):
            yield from _convolution(width, inputs, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(outputs, width, 1)
            if block == 0:
                yield from _convolution(outputs, inputs, 1)
            inputs = outputs
    yield from ((1000, inputs), (1000,))


def _convolution(outputs: int, inputs: int, kernel: int) -> tuple[Shape, ...]:
    return (outputs, inputs, kernel, kernel), (outputs,), (outputs,)


def bert_base() -> Iterator[Shape]:
    """Yield BERT-base's (Devlin et al., 2018), uncased, with its pooler and without a head."""
    hidden, inner, layers = 768, 3072, 12
    yield from ((30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,))
    for _ in range(layers):
        for _ in range(4):  # query, key, value, output
            yield from ((hidden, hidden), (hidden,))
        yield from ((hidden,), (hidden,))
        yield from ((inner, hidden), (inner,), (hidden, inner), (hidden,), (hidden,), (hidden,))
    yield from ((hidden, hidden), (hidden,))


def gpt2_small() -> Iterator[Shape]:
    """Yield those of GPT-2 (Radford et al., 2019) with 12 layers; the output layer is the embedding."""
    hidden, layers = 768, 12
    yield from ((50257, hidden), (1024, hidden))
    for _ in range(layers):
        yield from ((hidden,), (hidden,), (hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,))
        yield from ((hidden,), (hidden,), (hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,))
    yield from ((hidden,), (hidden,))


def small() -> Iterator[Shape]:
    """Yield 1000 tensors of 256 elements: 1 KB each in float32."""
    yield from [(256,)] * 1000


#: Name on the command line -> what yields the shapes.
MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": resnet50,
    "bert-base": bert_base,
    "gpt2-small": gpt2_small,
    "small": small,
}
