"""Train the classifier of handwritten digits with `Trainer.fit`.

The same script runs alone and on many ranks; the numbers are the same:

    python examples/fit.py
    mpirun -n 4 python examples/fit.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores among them; before NumPy is loaded

import argparse  # noqa: E402
from typing import Any  # noqa: E402

import digits  # noqa: E402
import mlp  # noqa: E402

import mpidist  # noqa: E402


def value_and_grad(parameters: Any, images: Any, labels: Any) -> tuple[Any, Any]:
    """Return the mean loss over these rows and its gradients; the rows are this rank's."""
    return mlp.value_and_grad(parameters, images, labels, batch_size=len(images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="rows of a global batch, over all ranks together")
    parser.add_argument("--checkpoint", metavar="DIR", help="save a checkpoint there after every epoch; go on from it")
    arguments = parser.parse_args()

    train, test = digits.load()
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpidist.Variable(value, name=name) for name, value in mlp.initial(seed=0).items()]
        optimizer = mpidist.optimizers.SGD(mlp.LEARNING_RATE, momentum=0.9)
    trainer = mpidist.Trainer(value_and_grad, variables, optimizer, metrics=["accuracy"], predict_fn=mlp.logits)

    callbacks: list[Any] = [mpidist.callbacks.EarlyStopping("val_loss", patience=5)]
    if arguments.checkpoint:
        callbacks.append(mpidist.callbacks.ModelCheckpoint(arguments.checkpoint, resume=True))
    trainer.fit(
        train.images,
        train.labels,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=tuple(test),
        callbacks=callbacks,
    )
    loss, accuracy = trainer.evaluate(test.images, test.labels, batch_size=len(test.images), verbose=0)
    if trainer.is_chief:
        print(f"{strategy.num_replicas_in_sync} replicas, test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
