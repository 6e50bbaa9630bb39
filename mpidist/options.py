"""What a user may choose: the public enums and options, and the only reader of ``MPIDIST_*`` variables."""

from __future__ import annotations

import difflib
import enum
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, TypeVar

from mpidist.errors import quoted

_E = TypeVar("_E", bound="_NamedEnum")


class _NamedEnum(enum.Enum):
    """An enum that accepts its members' names in any case."""

    __hash__ = object.__hash__  # members are singletons, and that of `enum` is slow

    @classmethod
    def parse(cls: type[_E], value: Any) -> _E:
        """Return the member that `value` is, or names in any case; ValueError lists the known names."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        known = ", ".join(cls.__members__)
        raise ValueError(f"{quoted(value)} is not a valid {cls.__name__}; it is one of {known}")


class ReduceOp(_NamedEnum):
    """How values of several replicas become one.

    TensorFlow has SUM and MEAN.  The others are for values that gradients do not have: extremes, counts of
    combinations.

    Attributes
    ----------
    verb : str
        How the collectives call it: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PRODUCT = "PRODUCT"

    def __init__(self, name: str) -> None:
        self.verb = "prod" if name == "PRODUCT" else name.lower()

    @property
    def adds(self) -> bool:
        """Whether values are added: a sum, or a mean."""
        return self in (ReduceOp.SUM, ReduceOp.MEAN)

    @classmethod
    def parse(cls, value: Any) -> ReduceOp:
        """Return the member given, or named in any case; TypeError for what is no name."""
        if type(value) is cls:
            return value
        if not isinstance(value, str):
            raise TypeError(f"Expected `reduce_op` to be a `tf.distribute.ReduceOp`, not: {quoted(value)}")
        return _REDUCE_OPS.get(value) or super().parse(value)

    @classmethod
    def of_gradients(cls, value: Any) -> ReduceOp:
        """Return SUM or MEAN, given or named in any case; ValueError for others, which gradients do not have."""
        found = cls.parse(value)
        if not found.adds:
            raise ValueError(f"gradients are reduced by the ReduceOp SUM or MEAN, got {found.name}")
        return found


#: By their usual spellings, which every reduction looks up.
_REDUCE_OPS = {spelling: op for op in ReduceOp for spelling in (op.name, op.name.lower())}


class CommunicationImplementation(_NamedEnum):
    """Which all-reduce a multi-worker strategy uses.

    AUTO is a measured choice, and NCCL for arrays in GPU memory where the ranks can use it.  RING is the ring over MPI.
    NCCL is an error where it cannot be used; arrays of the host are reduced as with AUTO.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class VariableSynchronization(_NamedEnum):
    """When the copies of a variable are brought together."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(_NamedEnum):
    """How values written by several replicas become one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


#: Seconds after which a waiting collective warns, naming who is missing, and after which it fails.
WARN_SECONDS = 60.0
TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of cross-replica communication.

    Parameters
    ----------
    bytes_per_pack : int
        Size in bytes of the units that tensors are fused into; 0 leaves it to mpidist.
    timeout_seconds : float or None
        How long a collective waits for the other ranks before it raises `TransportTimeoutError`.
        None means the default of 30 minutes, 0 never.
    implementation : CommunicationImplementation or str
    deterministic : bool
        Whether an all-reduce is chosen by a fixed table in place of measured times, so that every launch on as many
        ranks, placed alike, gives the same bits.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be 0 (automatic) or more, got {self.bytes_per_pack}")
        check_timeout(self.timeout_seconds)
        object.__setattr__(self, "implementation", CommunicationImplementation.parse(self.implementation))

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options with those fields of `other` that differ from the defaults put over them."""
        if other is None:
            return self
        changed = {f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name) != f.default}
        return replace(self, **changed)


def check_timeout(seconds: float | None) -> None:
    """Raise TypeError or ValueError unless these are seconds to wait for, 0 (never), or None (the default).  Local."""
    if seconds is None:
        return
    is_plain = type(seconds) in (int, float)  # the quick way: every call with a deadline of its own comes here
    if not is_plain and (isinstance(seconds, bool) or not isinstance(seconds, Real)):
        raise TypeError(f"timeout_seconds must be a number, 0 (never) or more, or None, got {quoted(seconds)}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"timeout_seconds must be 0 (never) or more, and finite, got {seconds}")


@dataclass(frozen=True)
class Settings:
    """What the ``MPIDIST_*`` environment variables ask for; every field's comment names its variable."""

    timeout_seconds: float = TIMEOUT_SECONDS  # MPIDIST_TIMEOUT_SECONDS, 0 never
    warn_seconds: float = WARN_SECONDS  # MPIDIST_WARN_SECONDS
    algorithm: str = "auto"  # MPIDIST_ALGORITHM: auto, native, ring, nccl, ... for every all-reduce
    deterministic: bool = False  # MPIDIST_DETERMINISTIC=1: no measured choice, the same bits in each launch
    tuning_folder: str = ""  # MPIDIST_TUNING_FOLDER: where mpidist tune keeps its figures; empty: the user's cache
    shared_memory: bool = True  # MPIDIST_SHARED_MEMORY=0 keeps to message passing
    snapshots: str = "auto"  # MPIDIST_SNAPSHOTS: whether values of variables are copies; auto, 0 or 1
    sharded_updates: bool = True  # MPIDIST_SHARDED_UPDATES=0: every rank updates all parameters, and keeps all slots
    virtual_nodes: int = 1  # MPIDIST_VIRTUAL_NODES=2 treats each host as two nodes, to try the path between nodes
    roles: str = ""  # MPIDIST_ROLES: which ranks are what under ParameterServerStrategy, as chief:1,worker:*,ps:2
    no_mpi: bool = False  # MPIDIST_NO_MPI=1: one rank alone whatever the launcher's variables say
    trace: str = ""  # MPIDIST_TRACE: the folder in which every rank notes what it does when; empty: nothing is noted
    fault_tolerant: bool = False  # MPIDIST_FAULT_TOLERANT=1: the job goes on without a rank that others can do without
    array_chain: bool = False  # MPIDIST_ARRAY_CHAIN=1: tasks of a job array go on with each other's checkpoints
    run_folder: str = ""  # MPIDIST_RUN_FOLDER: set by `mpidist run`, where ranks note how far MPI's start-up has come


#: The variable of `Settings.run_folder`.
RUN_FOLDER = "MPIDIST_RUN_FOLDER"

#: The variable of `Settings.no_mpi`.
NO_MPI = "MPIDIST_NO_MPI"

#: The variable of `Settings.timeout_seconds`.
TIMEOUT = "MPIDIST_TIMEOUT_SECONDS"

#: The variable of `Settings.fault_tolerant`.
FAULT_TOLERANT = "MPIDIST_FAULT_TOLERANT"

#: The variable of `Settings.array_chain`.
ARRAY_CHAIN = "MPIDIST_ARRAY_CHAIN"

#: The variable by which `mpidist run` knows its ranks; where it is set, `mpidist run` has warned already.
RUN_TOKEN = "MPIDIST_RUN_TOKEN"

#: What is expected of a variable, by the type of its setting.
_EXPECTED = {bool: "0 or 1", float: "a number of seconds, 0 (never) or more", int: "a whole number, 1 or more"}

_warned: set[str] = set()  # unknown variables of which has been warned


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the `Settings` of this environment (Local).

    Warns once of a variable ``MPIDIST_*`` that there is not, with the names that are like it.  A ValueError names a
    variable that cannot be read, and what is expected of it.
    """
    environ = os.environ if environ is None else environ
    _warn_of_unknown(environ)
    values = {}
    for field in fields(Settings):
        name = f"MPIDIST_{field.name.upper()}"
        if name in environ:
            values[field.name] = _convert(name, environ[name], type(field.default))
    chosen = Settings(**values)
    least = {"timeout_seconds": 0, "warn_seconds": 0, "virtual_nodes": 1}
    for setting, limit in least.items():
        value = getattr(chosen, setting)
        if not limit <= value < math.inf:
            expected = _EXPECTED[type(value)]
            raise ValueError(f"environment variable MPIDIST_{setting.upper()}={value:g}: expected {expected}")
    if chosen.snapshots not in ("0", "1", "auto"):
        raise ValueError(f"environment variable MPIDIST_SNAPSHOTS={chosen.snapshots!r}: expected 0, 1 or auto")
    return chosen


def changed(chosen: Settings) -> dict[str, tuple[Any, Any]]:
    """Return variable -> (value, default) of settings that differ; where `mpidist run` has its notes is no choice."""
    own = [field for field in fields(Settings) if field.name != "run_folder"]
    found = {f"MPIDIST_{field.name.upper()}": (getattr(chosen, field.name), field.default) for field in own}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    if RUN_TOKEN in environ:
        return
    prefix, known = "MPIDIST_", [field.name.upper() for field in fields(Settings)]
    asked = {name.removeprefix(prefix) for name in environ if name.startswith(prefix)}
    for name in sorted(asked - {*known} - _warned):
        _warned.add(name)
        like = ", ".join(prefix + each for each in difflib.get_close_matches(name, known) or known)
        warnings.warn(
            f"environment variable {prefix}{name} is unknown to mpidist and changes nothing; known: {like}",
            RuntimeWarning,
            stacklevel=3,
        )


def _convert(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"0": False, "1": True}[text]
        return kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"environment variable {name}={text!r}: expected {_EXPECTED[kind]}") from None
