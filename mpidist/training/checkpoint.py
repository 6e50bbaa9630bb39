"""`Checkpoint`: variables, optimizers and positions in one file, saved and restored by all ranks together."""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy

from mpidist import arrays, context
from mpidist.collectives.from_chief import from_chief
from mpidist.errors import CheckpointError, CheckpointNotFoundError, MpidistError, listed
from mpidist.optimizers import Optimizer
from mpidist.optimizers.saved_slots import is_default_name
from mpidist.reporting.notes import note_checkpoint
from mpidist.strategies import workers
from mpidist.training import hdf5_file, hdf5_parallel
from mpidist.training.entry_names import coded, shortened
from mpidist.training.given_path import given_path
from mpidist.training.owner import Unowned
from mpidist.training.temporary_files import temporary
from mpidist.transports import WorldKept, in_kept_world, innermost
from mpidist.variables import DistributedVariable
from mpidist.world import world_communicator

#: The rank that writes and reads files.
CHIEF = 0

#: The name of a variable is saved under this name, beside its value.
_NAME = "name"

#: What is saved of an object whose state is empty, so that a file shows that the object was there.
_NO_STATE: dict[str, Any] = {"": None}


class RandomState:
    """A random generator in a checkpoint, by the chief's state.  All Local."""

    def __init__(self, generator: numpy.random.Generator) -> None:
        self._generator = generator

    def state(self) -> dict[str, Any]:
        """Return the numbers and arrays of the bit generator's state."""
        return dict(_flat("", self._generator.bit_generator.state))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a state is that of another kind of bit generator."""
        kind = type(self._generator.bit_generator).__name__
        if state.get("bit_generator") != kind:
            raise CheckpointError(f"a random state of {state.get('bit_generator')} was saved, this generator is {kind}")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state; errors as for `check`."""
        self.check(state)
        self._generator.bit_generator.state = _nested(state)


class Checkpoint:
    """What belongs to a training run, by name, to be saved and restored together.

    A checkpoint holds no trace of the number of ranks: it restores at any other, every array bit for bit.

    Parameters
    ----------
    **objects
        Variables; random generators of NumPy; objects with ``state()`` and ``restore(state)``; and dicts, lists and
        tuples of these.  Optimizers, distributed data sets, their iterators, and metrics are such objects.  A state is
        a dict of arrays and numbers, the same on all ranks: the chief's is saved, and all ranks get it.  An object may
        have ``check(state)``, which raises what ``restore`` would raise, and is called before anything is changed.
        Objects without it are restored first.

    Raises
    ------
    TypeError
        If an object is none of these.
    ValueError
        Two objects have one name, such as ``{"a": {"b": v}, "a/b": w}``; or a name is longer than a file can
        hold, or no text.

    Examples
    --------
    ::

        checkpoint = mpidist.Checkpoint(model={"w": w, "b": b}, optimizer=optimizer, dataset=distributed)
        checkpoint.save("run/first.h5")
    """

    def __init__(self, **objects: Any) -> None:
        self.kept_world = WorldKept(innermost())
        self._parts: dict[str, Any] = {}
        self._told: set[str] = set()  # names of parts that a warning has named
        self.include("", objects)

    @property
    def parts(self) -> dict[str, Any]:
        """The objects in it, by name.  Local."""
        return dict(self._parts)

    @property
    def variables(self) -> list[DistributedVariable]:
        """The variables in it.  Local."""
        return list(self._variables().values())

    def include(self, name: str, part: Any) -> None:
        """Add an object under a name.  Local; every rank adds the same.

        A part with a true attribute `may_be_missing` is left as it is by a file that has nothing for it.

        Raises
        ------
        ValueError
            The name is taken, or no file can hold it.
        TypeError
            It is nothing that a checkpoint holds.
        """
        parts = self._parts.copy()
        for path, obj in _named_parts(name, part):
            if path in parts:
                raise ValueError(f"the checkpoint has a part {shortened(path)} already; give the new one another name")
            coded(path)  # what no file can hold is refused now, and not after hours
            parts[path] = obj
        for path in parts:
            for outer in accumulate(path.split("/")[:-1], "{}/{}".format):
                if outer in parts:
                    raise ValueError(
                        f"the checkpoint has parts {outer!r} and {path!r}, one inside the other; rename one"
                    )
        self.kept_world = _kept_world(parts.values()) or self.kept_world
        self._parts = parts

    def save(self, path: str | Path, parallel: bool | None = None) -> Path:
        """Write everything to an HDF5 file.  The file is complete afterwards, or as it was before.

        Collective: every rank calls it in the same order.  With parameter servers, where workers train by themselves,
        the first worker writes, and the others go on at once.

        Parameters
        ----------
        path : str or Path
            Its directory is made if need be.
        parallel : bool, optional
            True: all ranks write, each its part.  False: the chief writes alone.  The file is the same.  Default: True
            if there are several ranks and their h5py is built for parallel HDF5.

        Returns
        -------
        Path

        Raises
        ------
        CheckpointError
            On all ranks: it could not be written; the message has the reason.
        ValueError
            The path is empty.

        Warns
        -----
        RuntimeWarning
            On the chief, once for each object: its state differs by rank, and the chief's alone is saved.
        """
        return self.save_owned(given_path(path, "path", is_file=True), Unowned(), parallel)

    @in_kept_world
    def save_owned(self, path: Path, owner: Unowned, parallel: bool | None = None) -> Path:
        """Save as the owner of a directory; CheckpointError if the directory is another job's.  Collective."""
        job = workers.of_job()
        if not job.writes_checkpoints:
            return path
        arrays_here, numbers = job.undivided(self._collect)
        if not job.train_apart:  # what ranks read from servers is of different moments
            self._warn_of_differences(arrays_here, numbers)
        what = f"checkpoint {path} was not saved"
        write_fn = _write_together if _writes_together(parallel, what) else _write_alone
        if job.has_other_workers and world_communicator().rank == CHIEF:
            _warn_of_accumulations(self._parts.values())
        start = time.perf_counter()
        write_fn(path, arrays_here, numbers, what, owner)
        note_checkpoint(world_communicator(), "saved", path, time.perf_counter() - start)
        job.note_saved(path)
        return path

    @in_kept_world
    def restore(self, path: str | Path) -> None:
        """Set everything to the values in a file.

        Collective: every rank calls it in the same order.  The chief reads; other ranks need not see the file.  With
        parameter servers, where workers train by themselves, the first worker restores when all have called this, and
        the others wait for it; the chief of a `ClusterCoordinator` waits for the functions that it has scheduled.
        What is not on servers, such as places in data sets, stays as it is on the other workers.

        Raises
        ------
        CheckpointNotFoundError
            On all ranks: there is no such file.
        CheckpointError
            On all ranks: it is truncated or damaged, or does not fit these objects.  Nothing is changed then.
        """
        file = given_path(path, "path", is_file=True)
        workers.of_job().by_first_worker(lambda: self.restore_here(file))
        self.note_restored()

    def note_restored(self) -> None:
        """Have the optimizers of other workers know the learning rate that the first worker has restored.

        What they have accumulated before is left out.  Collective among the ranks of a worker.
        """
        if workers.of_job().writes_checkpoints:
            return
        for part in self._parts.values():
            if isinstance(part, Optimizer):
                part.read_learning_rate()
                part.forget_micro_batches()

    @in_kept_world
    def restore_here(self, path: str | Path) -> None:
        """Restore in this worker only.  Collective among its ranks."""
        path, start = Path(path), time.perf_counter()
        values = _shared(path)
        _agree(listed(self._misfits(values), "; "), f"checkpoint {path} does not fit")
        workers.of_job().undivided(lambda: self._restore_all(path, values))
        note_checkpoint(world_communicator(), "restored", path, time.perf_counter() - start)

    def _restore_all(self, path: Path, values: Mapping[str, Any]) -> None:
        """Restore every part."""
        ours = {name for name, part in self._parts.items() if isinstance(part, (DistributedVariable, Optimizer))}
        others = [name for name in self._parts if name not in ours]
        unchecked = [name for name in others if not hasattr(self._parts[name], "check")]
        # What may still raise comes first; a part of a training may have unchecked ones inside.
        for names in (unchecked, [name for name in others if name not in unchecked]):
            if names:
                _agree(_problem(partial(self._restore, names, values)), f"checkpoint {path} was not restored")
        self._restore((name for name in self._parts if name in ours), values)

    def _variables(self) -> dict[str, DistributedVariable]:
        return {name: part for name, part in self._parts.items() if isinstance(part, DistributedVariable)}

    def _misfits(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield why parts cannot be restored; changes nothing."""
        variables = self._variables()
        here = {variable.name for variable in variables.values()}
        for name, part in self._parts.items():
            if name in variables:
                problem = _variable_misfit(name, part, values, here)
            elif (state := _saved_state(values, name)) is not None:
                given = (state, variables) if isinstance(part, Optimizer) else (state,)
                found = _problem(partial(part.check, *given)) if hasattr(part, "check") else ""
                problem = found and f"{shortened(name)}: {found}"
            else:
                problem = "" if getattr(part, "may_be_missing", False) else f"it has nothing for {shortened(name)}"
            if problem:
                yield problem

    def _restore(self, names: Iterable[str], values: Mapping[str, Any]) -> None:
        variables = self._variables()
        for name in names:
            part = self._parts[name]
            if name in variables:
                part.restore(values[name])
            elif isinstance(part, Optimizer):
                part.restore(state_in(values, name), variables)
            elif (state := _saved_state(values, name)) is not None:
                part.restore(state)

    def _collect(self) -> tuple[dict[str, numpy.ndarray], dict[str, Any]]:
        """Return (arrays, numbers).  Collective where there are variables that are synchronized on read."""
        workers.of_job().pull()
        values: dict[str, Any] = {}
        paths = {id(variable): path for path, variable in self._variables().items()}
        for name, part in self._parts.items():
            if isinstance(part, DistributedVariable):
                values[name], values[f"{name}/{_NAME}"] = part.saved_value(), part.name
            else:
                state = part.state(paths) if isinstance(part, Optimizer) else part.state()
                values.update({f"{name}/{key}": value for key, value in (state or _NO_STATE).items()})
        found = {name: _on_host(value) for name, value in values.items() if _is_array(value)}
        return found, {name: value for name, value in values.items() if not _is_array(value)}

    def _warn_of_differences(self, found: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        """Warn on the chief of states that differ by rank, once for each part.  Collective."""
        communicator = world_communicator()
        if communicator.size == 1:
            return
        own = {
            name: {key: _checksum(each) for values in (found, numbers) for key, each in state_in(values, name).items()}
            for name, part in self._parts.items()
            if name not in self._told and not isinstance(part, (DistributedVariable, Optimizer))
        }
        raw = json.dumps(own).encode()
        if len(set(communicator.exchange(b"%d" % zlib.crc32(raw), what="checkpoint"))) == 1:
            return
        answers = [json.loads(each) for each in communicator.exchange(raw, what="checkpoint")]
        differ = []
        for name, of_chief in answers[CHIEF].items():
            states = [answer.get(name, {}) for answer in answers]
            for key, expected in of_chief.items():
                if ranks := [str(rank) for rank, state in enumerate(states) if state.get(key) != expected]:
                    differ.append(f"{shortened(f'{name}/{key}')} on ranks {listed(ranks)}")
                    self._told.add(name)
        if differ and communicator.rank == CHIEF:
            warnings.warn(
                f"states differ from that of rank {CHIEF}: {listed(differ, '; ')}. A checkpoint holds the chief's "
                "alone, and every rank gets it when it is restored: random generators would go on with the same "
                "numbers on all ranks. Let the ranks have the same state, or leave it out of the checkpoint and make "
                "it anew on each rank, such as numpy.random.default_rng((seed, rank, step))",
                RuntimeWarning,
                stacklevel=5,
            )


def _warn_of_accumulations(parts: Iterable[Any]) -> None:
    """Warn that a checkpoint has not what other workers have accumulated, which nobody else knows.  Local."""
    most = max((part.gradient_accumulation_steps for part in parts if isinstance(part, Optimizer)), default=1)
    if most > 1:
        warnings.warn(
            "a checkpoint has none of the gradients that the other workers have accumulated since their last updates: "
            f"a run that goes on from it has lost up to {most - 1} micro-batches of each",
            RuntimeWarning,
            stacklevel=5,
        )


def _kept_world(parts: Iterable[Any]) -> WorldKept | None:
    """Return the world of the variables' strategies, None where no strategy has any; ValueError for several worlds."""
    variables = [part for part in parts if isinstance(part, DistributedVariable)]
    strategies = [variable.strategy for variable in variables if not context.is_default(variable.strategy)]
    worlds = {id(strategy.extended.made_in): strategy.extended.made_in for strategy in strategies}
    if len(worlds) > 1:
        raise ValueError("the variables belong to strategies of several worlds; make a checkpoint for each world")
    return WorldKept(*worlds.values()) if worlds else None


def _named_parts(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for everything in nested dicts, lists and tuples."""
    if isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _named_parts(f"{prefix}/{key}" if prefix else str(key), item)
    elif isinstance(value, DistributedVariable) or (hasattr(value, "state") and hasattr(value, "restore")):
        yield prefix, value
    elif isinstance(value, numpy.random.Generator):
        yield prefix, RandomState(value)
    else:
        raise TypeError(
            f"{prefix!r} is a {type(value).__name__}; a checkpoint holds variables, random generators, and "
            "objects with state() and restore(state)"
        )


def _variable_misfit(name: str, variable: DistributedVariable, values: Mapping[str, Any], here: set[str]) -> str:
    """Return the reason why a variable does not fit its saved value, or nothing."""
    value, saved_name = values.get(name), values.get(f"{name}/{_NAME}", "")
    if value is None:
        return f"it has no array {shortened(name)}"
    if (value.shape, value.dtype) != (variable.saved_shape, variable.dtype):
        shape = list(variable.saved_shape)
        return f"{shortened(name)} is {value.dtype}{list(value.shape)} there, expected {variable.dtype}{shape}"
    if saved_name != variable.name and saved_name in here and not is_default_name(saved_name):
        return (
            f"{name!r} is variable {saved_name!r} there and {variable.name!r} here, where {saved_name!r} has another "
            "place; list the variables in the order in which they were saved"
        )
    return ""


def _problem(fn: Callable[[], object]) -> str:
    """Call a function; return its error as text."""
    try:
        fn()
    except Exception as error:  # whatever it is, the other ranks have to know
        return str(error) if isinstance(error, (ValueError, MpidistError)) else f"{type(error).__name__}: {error}"
    return ""


def state_in(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the saved state of a part that is no variable.  Local."""
    start = len(name) + 1
    return {key[start:]: value for key, value in values.items() if key.startswith(f"{name}/")}


def _saved_state(values: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the saved state of a part that is no variable; None where there is none."""
    state = state_in(values, name)
    return {} if list(state) == [""] and state[""] is None else state or None


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}/", value)
        else:
            yield f"{prefix}{key}", value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, key = name.split("/")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[key] = value
    return tree


# -- writing by the chief, or by all ranks -----------------------------------------------------------------------------


def _write_alone(
    path: Path, saved_arrays: Mapping[str, numpy.ndarray], numbers: Mapping[str, Any], what: str, owner: Unowned
) -> None:
    def write() -> None:
        owner.claim()
        hdf5_file.write(path, saved_arrays, numbers, owner.require)

    together(write, what)


def _writes_together(parallel: bool | None, what: str) -> bool:
    """Return whether all ranks write; the same on all of them."""
    communicator = world_communicator()
    if communicator.size == 1 or parallel is False:
        return False
    able = communicator.transport.name == "mpi" and hdf5_parallel.is_available()
    if parallel is None:
        return b"0" not in communicator.exchange(str(int(able)).encode(), what="checkpoint")
    _agree(
        "" if able else "h5py is not built for parallel HDF5, or the ranks are not MPI's; save with parallel=None", what
    )
    return True


def _write_together(
    path: Path, saved_arrays: Mapping[str, numpy.ndarray], numbers: Mapping[str, Any], what: str, owner: Unowned
) -> None:
    communicator = world_communicator()
    rank, size, comm = communicator.rank, communicator.size, communicator.transport.mpi_communicator
    parts = hdf5_parallel.part_checksums(saved_arrays, rank, size)
    described = [[name, array.dtype.name, list(array.shape)] for name, array in saved_arrays.items()]
    of_chief = [numbers, str(temporary(path))] if rank == CHIEF else None
    raw = communicator.exchange(json.dumps([described, parts, of_chief]).encode(), "checkpoint")
    answers = [json.loads(each) for each in raw]
    _agree("" if answers[rank][0] == answers[CHIEF][0] else f"its arrays are not those of rank {CHIEF}", what)
    checksums = hdf5_parallel.whole_checksums(list(saved_arrays), [answer[1] for answer in answers])
    numbers, written = answers[CHIEF][2]

    def begin() -> None:
        hdf5_file.require_storable(saved_arrays)
        owner.claim()
        hdf5_file.begin(path)

    together(begin, what)
    ranges: hdf5_file.Ranges = []
    problem = ""
    try:
        ranges = hdf5_parallel.write_parts(Path(written), saved_arrays, numbers, checksums, rank, size, comm)
    except OSError as error:
        problem = str(error)
    try:
        _agree(problem, what)
        together(lambda: hdf5_parallel.seal(Path(written), path, ranges, owner.require), what)
    except CheckpointError:
        if rank == CHIEF:
            Path(written).unlink(missing_ok=True)
        raise


# -- all ranks together ------------------------------------------------------------------------------------------------


def together(chief_fn: Any, what: str) -> Any:
    """Call `chief_fn` on the chief and return its result, which JSON can hold, on all; its failure is raised on all."""

    def call() -> Any:
        try:
            return chief_fn()
        except Exception as error:
            cause = hdf5_file.first_cause(error)
        raise cause  # not in the handler, which would add what closing the file has raised

    found = from_chief(world_communicator(), call, "checkpoint")
    if found.kind:
        raise _error(found.kind, f"{what}: rank {CHIEF}: {found.text}") from found.error
    return found.result


def _error(kind: str, message: str) -> CheckpointError:
    raised = CheckpointNotFoundError(message) if kind == CheckpointNotFoundError.__name__ else CheckpointError(message)
    raised.on_all_ranks = True
    return raised


def _agree(problem: str, what: str) -> None:
    """Raise CheckpointError on all ranks when one of them has a problem; names the ranks that have one."""
    answers = [raw.decode() for raw in world_communicator().exchange(problem.encode(), what="checkpoint")]
    found = {rank: answer for rank, answer in enumerate(answers) if answer}
    if found:
        first = next(iter(found))
        raise _error("CheckpointError", f"{what} on ranks {listed(map(str, found))}; rank {first}: {found[first]}")


def _shared(path: Path) -> dict[str, Any]:
    """Return the arrays and numbers that the chief reads in a file in one dict, on every rank.  Collective."""
    arrays_of_chief: dict[str, numpy.ndarray] = {}

    def read() -> Any:
        arrays_read, numbers = hdf5_file.read(path)
        arrays_of_chief.update(arrays_read)
        return numbers, [[name, array.dtype.name, list(array.shape)] for name, array in arrays_of_chief.items()]

    values, entries = together(read, f"checkpoint {path} was not restored")
    communicator = world_communicator()
    for name, dtype, shape in entries:
        array = arrays_of_chief[name] if communicator.rank == CHIEF else numpy.empty(shape, dtype)
        communicator.broadcast(arrays.byte_view(array), root=CHIEF)
        values[name] = array
    return values


def _checksum(value: Any) -> int:
    """Return a CRC-32 of an array or number of a state."""
    if _is_array(value) and not value.dtype.hasobject:
        return zlib.crc32(f"{value.dtype}{value.shape}".encode(), hdf5_file.checksum(value))
    return zlib.crc32(repr(value).encode())


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype")


def _on_host(value: Any) -> numpy.ndarray:
    """Return an array of the host, in its byte order: names of dtypes do not tell that."""
    array = numpy.asarray(arrays.on_host(arrays.to_array(value)))
    return array.astype(array.dtype.newbyteorder("="), copy=False)
