"""Train a linear classifier of handwritten digits with an Estimator.

The same script runs alone, on many ranks, and with parameter servers and an evaluator:

    python examples/estimator_linear.py
    mpirun -n 4 python examples/estimator_linear.py
    mpirun -n 4 python examples/estimator_linear.py --strategy CentralStorageStrategy
    MPIDIST_ROLES=chief:1,worker:1,ps:1,evaluator:1 mpidist run -n 4 examples/estimator_linear.py \\
        --strategy ParameterServerStrategy --model-dir run/1
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores among them; before NumPy is loaded

import argparse  # noqa: E402
from collections.abc import Callable  # noqa: E402

import digits  # noqa: E402

import mpidist  # noqa: E402
from mpidist import estimator  # noqa: E402
from mpidist.data import Dataset  # noqa: E402

STRATEGIES = "MirroredStrategy MultiWorkerMirroredStrategy CentralStorageStrategy TPUStrategy ParameterServerStrategy"


def rows_of(examples: digits.Digits) -> Dataset:
    """Return the examples as features and numbers of classes."""
    return Dataset.from_arrays(({"pixels": examples.images}, examples.labels.argmax(axis=1)))


def input_fn_of(examples: digits.Digits, batch_size: int) -> Callable[..., Dataset]:
    """Return an input function: batches for one replica, of this worker's rows."""

    def input_fn(input_context: mpidist.InputContext) -> Dataset:
        rows = rows_of(examples).shuffle(seed=0).repeat()
        return rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).batch(batch_size)

    return input_fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES.split(), default="MultiWorkerMirroredStrategy")
    parser.add_argument("--model-dir", metavar="DIR", help="where checkpoints are; a temporary folder by default")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--global-batch-size", type=int, default=96, help="rows of a step, over all replicas together")
    arguments = parser.parse_args()

    strategy = getattr(mpidist, arguments.strategy)()
    train, test = digits.load()
    config = estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=100)
    classifier = estimator.LinearClassifier(
        [mpidist.feature_column.numeric_column("pixels", shape=train.images.shape[1:])],
        arguments.model_dir,
        n_classes=10,
        optimizer=lambda: mpidist.optimizers.SGD(0.1, momentum=0.9),
        config=config,
    )
    batch_size = arguments.global_batch_size // strategy.num_replicas_in_sync
    results, _ = estimator.train_and_evaluate(
        classifier,
        estimator.TrainSpec(input_fn_of(train, batch_size), max_steps=arguments.max_steps),
        estimator.EvalSpec(lambda: rows_of(test).batch(100), steps=None, start_delay_secs=0, throttle_secs=1),
    )
    if results is not None and (config.is_chief or config.is_evaluator):
        print(f"step {results['global_step']}, test loss {results['loss']:.4f}, accuracy {results['accuracy']:.4f}")


if __name__ == "__main__":
    main()
