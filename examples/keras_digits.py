"""Train a Keras model on images of handwritten digits; the same script runs alone and on many ranks.

KERAS_BACKEND=jax python examples/keras_digits.py
KERAS_BACKEND=torch mpidist run -n 4 examples/keras_digits.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores among them; before NumPy is loaded
os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse  # noqa: E402

import needed  # noqa: E402

needed.packages("keras", os.environ["KERAS_BACKEND"], install="pip install '.[keras,jax,examples]', or keras,torch")

import digits  # noqa: E402
import keras  # noqa: E402

import mpidist  # noqa: E402


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((digits.SIDE, digits.SIDE)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(digits.CLASSES),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="rows of a global batch, over all ranks together")
    parser.add_argument("--backup", metavar="DIR", help="go on from there after an end")
    parser.add_argument("--save", metavar="FILE", help="save the model, a plain one of Keras: FILE.keras")
    arguments = parser.parse_args()

    train, test = digits.load()
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

    callbacks = [keras.callbacks.EarlyStopping("val_loss", patience=5)]
    if arguments.backup:
        callbacks.append(keras.callbacks.BackupAndRestore(arguments.backup))
    model.fit(
        train.images,
        train.labels,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=tuple(test),
        callbacks=callbacks,
    )
    found = model.evaluate(test.images, test.labels, batch_size=len(test.images), verbose=0, return_dict=True)
    if arguments.save:
        model.save(arguments.save)
    if strategy.extended.is_chief:
        replicas = strategy.num_replicas_in_sync
        print(f"{replicas} replicas, test loss {found['loss']:.4f}, test accuracy {found['accuracy']:.4f}")


if __name__ == "__main__":
    main()
