"""What the replicas compare before they train: their data, and their models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy

from mpidist.collectives.mismatch import fact
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.variables import learning_rates, optimizers_of
from mpidist.input.agreement import Facts, checksum

#: The call that is made of each batch of a loader or generator, and at its end.
_NEXT_BATCH = "the next batch of Keras inputs"

#: Checksums of all arrays together cover about so many bytes.
_MOST_BYTES = 1 << 18


def compare_arrays(replica: ModelReplica, what: str, given: Any, settings: dict[str, Any]) -> None:
    """Raise CollectiveMismatchError on all ranks unless they have the same arrays and settings.  Collective.

    `what`: the call that is made.  `given`: all rows, on every rank.  Checksums cover some rows.  `settings`: numbers
    and names that decide what is done.
    """
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    facts: Facts = [(f"array {place}", leaf.dtype, leaf.shape) for place, leaf in enumerate(leaves)]
    facts += [fact(name, value) for name, value in settings.items()]
    replica.replicas.check(what, [*facts, *_checksums(leaves, "all rows")])


def compare_batch(replica: ModelReplica, rows: int, leaves: Sequence[Any]) -> None:
    """Raise CollectiveMismatchError on all ranks unless they have the same batch of a loader or generator.  Collective.

    A rank whose data have ended calls `compare_ends` in its place.
    """
    replica.replicas.check(_NEXT_BATCH, [fact("rows", rows), *_checksums(leaves, "whole batches")])


def _checksums(leaves: Sequence[Any], given: str) -> Facts:
    """Return the checksums of arrays, in the words of an error, which says what every rank is given."""
    return [
        fact(
            f"checksum of array {place} (every rank is given {given})",
            f"{checksum(leaf, _MOST_BYTES // len(leaves)):#010x}",
        )
        for place, leaf in enumerate(leaves)
        if not leaf.dtype.hasobject
    ]


def compare_ends(replica: ModelReplica, batches: int) -> None:
    """Raise CollectiveMismatchError on all ranks unless the data of all of them have ended.  Collective."""
    replica.replicas.check(_NEXT_BATCH, [fact("rows", f"none (the data ended after {batches} batches)")])


def compare_models(replica: ModelReplica, model: keras.Model, what: str) -> None:
    """Raise CollectiveMismatchError on all ranks unless their models have the same variables.  Collective."""
    trainable = {id(each) for each in model.trainable_variables}
    facts: Facts = []
    for place, variable in enumerate(model.variables):
        kind = "trainable" if id(variable) in trainable else "not trainable"
        name = f"variable {place} {_without_numbers(variable.name)}, {kind}"
        facts.append((name, variable.dtype, tuple(variable.shape)))
    optimizer = getattr(model, "optimizer", None)
    facts.append(fact("optimizer", type(optimizer).__name__))
    for place, each in enumerate(optimizers_of(model)):
        if each is not optimizer:
            facts.append(fact(f"optimizer {place}", f"{type(each).__name__} with {len(each.variables)} variables"))
    replica.replicas.check(what, facts)


def compare_weights(replica: ModelReplica, variables: Sequence[tuple[str, Any]], what: str) -> None:
    """Raise CollectiveMismatchError on all ranks unless their variables, with names, have the same bits.  Collective.

    Checksums cover some of the rows of each variable.
    """
    facts: Facts = []
    for place, (name, variable) in enumerate(variables):
        array = numpy.ascontiguousarray(to_numpy(variable))  # of one axis at least
        shown = checksum(array.view("uint8"), max(_MOST_BYTES // len(variables), 64))
        facts.append(fact(f"variable {place} {_without_numbers(name)}", f"{shown:#010x}"))
    replica.replicas.check(what, facts)


def rates(model: keras.Model) -> dict[str, str]:
    """Return the learning rates of a model's optimizers, as settings for `compare_arrays`.  Local."""
    pairs = [(each, rate) for each in optimizers_of(model) for rate in learning_rates(each)]
    return {
        f"learning rate {place} ({type(optimizer).__name__})": str(to_numpy(rate)[()])
        for place, (optimizer, rate) in enumerate(pairs)
    }


def _without_numbers(name: str) -> str:
    """Return a name without those by which Keras tells names apart: a rank may have made more models than others."""
    return re.sub(r"_\d+", "", name)
