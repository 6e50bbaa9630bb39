"""The control channel: how ranks know of each other while they wait, so that no rank waits forever.

Every collective call has a number, counted alike on all ranks, and a digest of what it works on.  A rank posts both
on the status board of its node before it moves data.  Every waiting loop calls `Watch.tick`, which looks at the board
(has a rank failed, left, been killed?) and at the clock (is it time to warn, has the deadline passed?).  Between nodes
a `Messenger` carries the same facts.  Nothing here blocks, and nothing is done by a second thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mpidist.errors import (
    MpidistError,
    RankFailedError,
    RemoteReplicaError,
    TransportError,
    TransportTimeoutError,
    listed,
)
from mpidist.options import Settings, check_timeout, settings
from mpidist.output import say
from mpidist.runtime import board as states
from mpidist.runtime.attendance import Attendance
from mpidist.runtime.board import StatusBoard, fence, needs_fence
from mpidist.runtime.failures import Failures
from mpidist.runtime.missed_calls import MissedCalls
from mpidist.runtime.stall import Arbiter, Messenger
from mpidist.runtime.standoff import Standoffs
from mpidist.runtime.turnstile import Turnstile
from mpidist.runtime.watch import Watch, let_threads_run

__all__ = ["ControlChannel", "Watch"]

#: A rank that comes a little earlier than another looks so often before its first look around, which takes longer.
_SPINS = range(50)

#: So many characters of the end of an error's text are told to the ranks of other nodes.
_NOTICE_CHARACTERS = 4000


class ControlChannel:
    """What one rank knows and tells about the state of all ranks.

    Parameters
    ----------
    rank, size : int
        Place in the world, and its size.
    board : StatusBoard
        Shared with the ranks in `board_ranks`.
    board_ranks : sequence of int
        World ranks, by index on the board.
    hosts : sequence of str, optional
        Host of every world rank, for messages.
    messenger : Messenger, optional
        Carries notices to ranks that do not share the board.
    pause : callable, optional
        Called in every turn of a waiting loop to let others run; None to spin, where cores suffice.
    whole : ControlChannel, optional
        The channel of the whole world, where this one is of a part of it.  When one breaks, both do.
    members : sequence of int, optional
        By rank of this channel: its rank in `whole`.
    job_ranks : sequence of int, optional
        By rank: its number in the whole job, MPI's COMM_WORLD, where that is another matter.

    Attributes
    ----------
    board_index : int
        Where this rank stands on the board: its local rank, where the board is that of a node.
    call : int
        Number of the last collective call begun by this rank.
    turnstile : Turnstile
        To be entered around every collective call, by way of `Communicator.turnstile`.
    at_end : list of callable
        What is called before this rank says that it ends: by `leave`, `fail` or `end`, and so more than once.
    at_break : list of callable
        What is called when an error has ended the channel, or this rank: by `breaks`, `fail` or `end`, and so more than
        once.
    vital_ranks : frozenset of int
        The ranks that a fault-tolerant job cannot do without; to be set alike on all ranks.  While it is empty, the job
        can do without none.
    duties : dict of int to (str, str)
        By rank that has a duty: its title, such as "ps 1", and the cure when the rank has died.
    missed : MissedCalls
        The calls that this rank, or others, do not make because the function given to `run` raised there.
    broken : MpidistError or None
        The error that ended the channel, None while it works.
    standoffs : Standoffs or None
        Of a process that has several worlds; set by who makes them.
    raised : (type, str) or None
        The last error that a collective call raised, and its text.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        board: StatusBoard,
        board_ranks: Sequence[int],
        *,
        hosts: Sequence[str] = (),
        messenger: Messenger | None = None,
        pause: Callable[[], object] | None = None,
        chosen: Settings | None = None,
        whole: ControlChannel | None = None,
        members: Sequence[int] = (),
        job_ranks: Sequence[int] = (),
    ) -> None:
        self.rank, self.size = rank, size
        self.board, self.board_ranks, self.board_index = board, tuple(board_ranks), list(board_ranks).index(rank)
        self.hosts, self.pause = tuple(hosts), pause
        self.settings = settings() if chosen is None else chosen
        self.call, self._what = 0, ""
        self.broken: MpidistError | None = None
        self.standoffs: Standoffs | None = None
        self.raised: tuple[type[BaseException], str] | None = None
        self.vital_ranks: frozenset[int] = frozenset()
        self.duties: dict[int, tuple[str, str]] = {}
        self._parts: list[ControlChannel] = []
        self._whole = whole
        self.world_ranks: tuple[int, ...] = tuple(
            range(size) if whole is None else map(whole.world_ranks.__getitem__, members)
        )
        self.world_size: int = size if whole is None else whole.world_size
        self.job_ranks: tuple[int, ...] = tuple(job_ranks) if whole is None else whole.job_ranks
        if whole is not None:
            whole._parts.append(self)
        self.turnstile, self.missed = Turnstile(self), MissedCalls(self)
        self.at_end: list[Callable[[], object]] = []
        self.at_break: list[Callable[[], object]] = []
        self.attendance, self.failures = Attendance(self), Failures(self)
        self.arbiter = Arbiter(self, messenger) if messenger is not None else None
        # By parity of a call, where on the board this rank posts it, and where the others do.
        self._words, self._own_words = board.words, board.call_words(self.board_index)
        others = [board.call_words(index) for index in range(board.size) if index != self.board_index]
        self._peer_words = tuple(tuple(words[parity] for words in others) for parity in (0, 1))
        board.sign_on(self.board_index)

    @classmethod
    def alone(cls, chosen: Settings | None = None) -> ControlChannel:
        """Return the channel of a world of one rank."""
        return cls(0, 1, StatusBoard(bytearray(StatusBoard.nbytes(1)), 1), [0], chosen=chosen)

    @classmethod
    def for_threads(cls, size: int, hosts: Sequence[str] = (), chosen: Settings | None = None) -> list[ControlChannel]:
        """Return one channel a rank for a world whose ranks are threads of this process."""
        board = StatusBoard(bytearray(StatusBoard.nbytes(size)), size)
        ranks = range(size)
        return [cls(rank, size, board, ranks, hosts=hosts, pause=let_threads_run, chosen=chosen) for rank in ranks]

    # -- calls ----------------------------------------------------------------------------------------------------

    def begin(self, what: str, digest: int, timeout_seconds: float | None = None) -> Watch:
        """Number a collective call, post it with its `digest` on the board, and return the watch over its waits.

        Local; inside the `turnstile`.
        """
        if timeout_seconds is not None:
            check_timeout(timeout_seconds)
        self._what = what
        self.call = call = self.call + 1
        words, own = self._words, self._own_words[call & 1]
        words[own + 1] = digest  # as `StatusBoard.post`, without a call
        if needs_fence:
            fence()
        words[own] = call
        return Watch(self, what, timeout_seconds, call)

    def meet(self, watch: Watch) -> bool:
        """Wait until every rank of the board has come to this call; return whether all digests are the same.

        RemoteReplicaError, on all ranks that come, where a rank misses this call because the function given to `run`
        raised there.
        """
        words, call = self._words, watch.call
        peers = self._peer_words[call & 1]
        for word in peers:
            if words[word] < call:
                self._await(word, watch)
        if needs_fence:
            fence()
        mine = words[self._own_words[call & 1] + 1]
        for word in peers:
            if words[word + 1] != mine:
                remote = self.missed.error(watch)
                if remote is not None:
                    raise remote
                return False
        return True

    def gather(self, watch: Watch) -> None:
        """Wait until every rank of the board has come to this call."""
        for word in self._peer_words[watch.call & 1]:
            if self._words[word] < watch.call:
                self._await(word, watch)
        fence()

    def _await(self, word: int, watch: Watch) -> None:
        """Wait until another rank has posted the call of `watch` in that word."""
        words, call = self._words, watch.call
        for _ in _SPINS if self.pause is None else ():
            if words[word] >= call:
                return
        while words[word] < call:
            watch.tick()

    def watch(self, what: str, timeout_seconds: float | None = None) -> Watch:
        """Return a watch over waits that belong to no numbered call."""
        return Watch(self, what, timeout_seconds, 0)

    # -- what this rank says ----------------------------------------------------------------------------------------

    def fail(self, text: str, tell: bool = True) -> None:
        """Tell all ranks that this one has failed, with the text of its error; Local.

        Without `tell` only the ranks of the board learn it: for errors that every rank raises by itself.
        """
        self._close()
        if (
            self.board.state(self.board_index) != states.EXPIRED
        ):  # then the others raise that error, not this consequence
            self.board.set_state(self.board_index, states.FAILED, text)
        if tell and self.arbiter is not None:
            self.arbiter.tell("failed", text=text[-_NOTICE_CHARACTERS:])
        for part in self._parts:
            part.fail(text, tell)
        self._break()

    def leave(self) -> None:
        """Tell all ranks that this one takes part in no further call; Local."""
        self._close()
        if self.board.state(self.board_index) == states.RUNNING:
            self.board.set_state(self.board_index, states.LEFT)
            if self.arbiter is not None:
                self.arbiter.tell_left()
        for part in self._parts:
            part.leave()

    def end(self) -> None:
        """Say that this rank prints nothing more: who waits to print last may go on."""
        self._close()
        self.board.quiet[self.board_index] = 1
        for part in self._parts:
            part.end()
        self._break()

    def _close(self) -> None:
        """Call what is to be called when this rank ends, while nobody else ends the job for it."""
        for each in self.at_end:
            each()

    def _break(self) -> None:
        """Call what is to be called when this rank takes part in no further call."""
        for each in tuple(self.at_break):  # they may leave the list
            each()

    def expire(self, text: str) -> MpidistError:
        """Tell the ranks of the board that a deadline has passed, and return the error that all of them raise."""
        self.board.set_state(self.board_index, states.EXPIRED, text)
        return self.breaks(self.error(TransportTimeoutError, text))

    def give_up(self, text: str) -> MpidistError:
        """As `expire`, for what this rank knows of itself to be in vain for all; the ranks of other nodes raise too."""
        if self.arbiter is not None:
            self.arbiter.tell("verdict", text=text)
        return self.expire(text)

    # -- names and errors --------------------------------------------------------------------------------------------

    @property
    def own_name(self) -> str:
        """How messages of this rank begin."""
        number = self.world_ranks[self.rank]
        in_job = f" (rank {self.job_ranks[number]} of COMM_WORLD)" if self.job_ranks else ""
        return f"rank {number} of {self.world_size}{in_job}"

    def name(self, rank: int) -> str:
        """Return how messages call a rank: its number in the world, its host, and its number in the job if another."""
        number = self.world_ranks[rank]
        more = [self.hosts[rank]] if rank < len(self.hosts) else []
        if self.job_ranks:
            more.append(f"rank {self.job_ranks[number]} of COMM_WORLD")
        return f"rank {number} ({', '.join(more)})" if more else f"rank {number}"

    def has_raised(self, error: BaseException) -> bool:
        """Return whether `error` is one that a call of this channel raised last, or that ended the channel.  Local."""
        told = (type(error), str(error))
        return self.raised == told or (self.broken is not None and (type(self.broken), str(self.broken)) == told)

    def names(self, ranks: Sequence[int]) -> str:
        """Return how messages call some ranks, the first few in full."""
        return listed(map(self.name, ranks))

    def error(self, kind: Callable[..., MpidistError], text: str, *rest: int) -> MpidistError:
        """Return an error that begins with this rank's name; `rest` is the rank that the error is about, if any."""
        return kind(f"{self.own_name}: {text}", *map(self.world_ranks.__getitem__, rest))

    def warn(self, text: str) -> None:
        """Print a warning of this rank, now."""
        say(f"mpidist: {self.own_name}: {text}")

    # -- the end of the channel ---------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether the job goes on, as far as is known, when this rank leaves it: others can do without it."""
        if not self.settings.fault_tolerant or not self.vital_ranks or self.rank in self.vital_ranks:
            return False
        return self.failures.vital(self.watch("")) is None

    def standoff(self, watch: Watch) -> MpidistError | None:
        """Return the error of a rank that waits for one that waits for it, in another world."""
        error = None if self.standoffs is None else self.standoffs.error(self, watch)
        if error is not None:
            self.fail(str(error))  # the others of this world wait for this rank, which may go on in another one
        return error

    def failure_outside(self, watch: Watch) -> MpidistError | None:
        """Return the error of a rank that waits in a part of the world, when a rank outside of it has failed.

        None where the job goes on without that rank.
        """
        if self._whole is None or self.settings.fault_tolerant:
            return None
        return self._whole.failures.first(Watch(self._whole, watch.what, 0, 0))

    def breaks(self, error: MpidistError) -> MpidistError:
        """Remember `error` as the end of the channel and return it: every later call raises it again.

        It also ends the channel of the whole world, and the channels of its other parts.
        """
        if self._whole is not None:
            return self._whole.breaks(error)
        for channel in self._family():
            channel.broken = error
        for channel in self._family():
            channel._break()
        return error

    def _family(self) -> Iterator[ControlChannel]:
        """Yield this channel and those of its parts."""
        yield self
        for part in self._parts:
            yield from part._family()

    def break_off(self, error: BaseException) -> None:
        """End the channel because `error` was raised in the middle of a call; the others are told.  Local."""
        if self.broken is None and self.size > 1:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            text = f"{self._what} (call {self.call}) was broken off by {cause}"
            self.fail(text)
            self.breaks(self.error(TransportError, f"{text}; the ranks no longer agree on where they are: end the job"))

    def again(self) -> MpidistError:
        """Return the error that ended the channel, once more."""
        error = self.broken
        assert error is not None
        if isinstance(error, RemoteReplicaError):
            return RemoteReplicaError(str(error), error.rank, error.cause, error.call)
        arguments = (error.rank,) if isinstance(error, RankFailedError) else ()
        return type(error)(str(error), *arguments)
