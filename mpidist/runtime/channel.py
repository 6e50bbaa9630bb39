"""Protocols of a control channel and its parts, by which they see each other: no part imports another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mpidist.errors import MpidistError, RemoteReplicaError
from mpidist.options import Settings
from mpidist.runtime.board import StatusBoard


class Wait(Protocol):
    """A wait in a call; see `Watch`."""

    what: str
    call: int

    @property
    def timeout_seconds(self) -> float: ...

    def tick(self) -> None: ...


class Missed(Protocol):
    """The calls that ranks miss; see `MissedCalls`."""

    pending: bool

    def settle(self) -> None: ...

    def hear(self, rank: int, call: int, text: str) -> None: ...

    def error_of(self, rank: int, watch: Wait) -> RemoteReplicaError | None: ...


class Elsewhere(Protocol):
    """What is known of the ranks of other nodes; see `Arbiter`."""

    @property
    def failed_texts(self) -> Mapping[int, str]: ...

    @property
    def left_ranks(self) -> Mapping[int, int]: ...

    def tell_missed(self, call: int, text: str) -> None: ...

    def poll(self) -> None: ...

    def ask(self) -> None: ...

    def missing(self, call: int) -> list[int]: ...

    def silent(self, least: float) -> list[int]: ...

    def failure(self, watch: Wait) -> MpidistError | None: ...

    def decide(self, watch: Wait) -> None: ...


class Channel(Protocol):
    """A control channel; attributes and methods as for `ControlChannel`."""

    rank: int
    size: int
    call: int
    board: StatusBoard
    board_ranks: tuple[int, ...]
    board_index: int
    settings: Settings
    pause: Callable[[], object] | None
    vital_ranks: frozenset[int]
    duties: dict[int, tuple[str, str]]
    broken: MpidistError | None
    raised: tuple[type[BaseException], str] | None

    @property
    def missed(self) -> Missed: ...

    @property
    def arbiter(self) -> Elsewhere | None: ...

    @property
    def own_name(self) -> str: ...

    def world_rank(self, rank: int) -> int: ...

    def name(self, rank: int) -> str: ...

    def names(self, ranks: Sequence[int]) -> str: ...

    def error(self, kind: Callable[..., MpidistError], text: str, *rest: int) -> MpidistError: ...

    def warn(self, text: str) -> None: ...

    def expire(self, text: str) -> MpidistError: ...

    def breaks(self, error: MpidistError) -> MpidistError: ...

    def break_off(self, error: BaseException) -> None: ...

    def again(self) -> MpidistError: ...
