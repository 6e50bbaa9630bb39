"""How ranks of several nodes find out who is missing: rank 0 asks, everyone who waits answers.

Ranks that share a status board see each other's call numbers there.  Between nodes ranks send *notices*:

- A rank that fails tells all, and again when it has printed its error.
- A rank that leaves tells rank 0, and rank 0 tells all.
- A rank whose deadline has passed asks rank 0 for a verdict.  Rank 0 asks all ranks where they are, waits a moment, and
  tells all who is missing.

So a failure costs one message a rank, and a good run costs one message a rank, at its end.
"""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpidist.errors import MpidistError

if TYPE_CHECKING:
    from mpidist.runtime.control import ControlChannel, Watch

#: Seconds that rank 0 waits for answers, and that others wait for its verdict.
_ANSWER_SECONDS = 0.5
_VERDICT_SECONDS = 2.0


class Messenger(abc.ABC):
    """Carries short notices between ranks without ever blocking."""

    @abc.abstractmethod
    def send(self, rank: int, notice: bytes) -> None:
        """Start sending `notice` to a world rank."""

    @abc.abstractmethod
    def arrived(self) -> Iterator[tuple[int, bytes]]:
        """Yield what has arrived: (sender, notice)."""


class Arbiter:
    """What this rank knows about the ranks of other nodes, and its part in finding out more."""

    def __init__(self, control: ControlChannel, messenger: Messenger) -> None:
        self._control = control
        self._messenger = messenger
        self._away = [rank for rank in range(control.size) if rank not in control.board_ranks]
        self._calls = dict.fromkeys(self._away, 0)
        self._silences: dict[int, float] = {}
        #: The errors of failed ranks of other nodes, and how many calls those had made that have left, as far as heard.
        self.failed_texts: dict[int, str] = {}
        self.left_ranks: dict[int, int] = {}
        #: The ranks of other nodes that have printed the error by which they failed.
        self.have_spoken: set[int] = set()
        #: How rank 0 has settled who is missing.
        self.verdict: str | None = None
        self._asked = False
        self._appealed = False
        self._judged = False

    # -- telling ------------------------------------------------------------------------------------------------------

    def tell(self, kind: str, **more: Any) -> None:
        """Tell every rank of another node what `poll` makes of a notice of that kind."""
        self._tell(self._away, kind=kind, **more)

    def tell_left(self) -> None:
        """Tell rank 0 that this rank leaves; rank 0 tells every rank of another node."""
        self._tell(self._told_of_leaving, kind="left", call=self._control.call)

    @property
    def _told_of_leaving(self) -> list[int]:
        """The ranks with which this rank exchanges notices of leaving."""
        return self._away if self._control.rank == 0 else [0] if 0 in self._calls else []

    def _tell(self, ranks: list[int], **notice: Any) -> None:
        raw = json.dumps(notice).encode()
        for rank in ranks:
            self._messenger.send(rank, raw)

    # -- hearing ------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what has arrived, and answer questions."""
        for sender, raw in self._messenger.arrived():
            notice = json.loads(raw)
            match notice["kind"]:
                case "failed":  # and by which error
                    self.failed_texts[sender] = notice["text"]
                case "spoken":  # the error by which it failed is printed
                    self.have_spoken.add(sender)
                case "missed":  # a call, and the error for which it does
                    self._control.missed.hear(sender, notice["call"], notice["text"])
                case "left":
                    self.left_ranks[sender] = self._calls[sender] = notice["call"]
                case "verdict":  # the text of the error that all ranks raise
                    self.verdict = notice["text"]
                case "question":
                    self._answer(sender)
                case "answer":
                    self._take_in(sender, notice)
                case "appeal":
                    self._calls[sender] = max(notice["call"], self._calls.get(sender, 0))
                    if self.verdict is None:
                        self._judge(notice["what"], notice["call"], notice["waited"])

    def _answer(self, sender: int) -> None:
        board = self._control.board
        calls = {rank: board.call(index) for index, rank in enumerate(self._control.board_ranks)}
        silences = [pair for pair in self._control.attendance.silences() if pair[0] != self._control.rank]
        self._tell([sender], kind="answer", calls=list(calls.items()), silences=silences)

    def _take_in(self, sender: int, answer: dict[str, Any]) -> None:
        for rank, call in answer["calls"]:
            self._calls[rank] = max(call, self._calls.get(rank, 0))
        self._silences[sender] = 0.0
        for rank, seconds in answer["silences"]:
            self._silences[rank] = min(seconds, self._silences.get(rank, seconds))

    # -- knowing ------------------------------------------------------------------------------------------------------

    def missing(self, call: int) -> list[int]:
        """Return the ranks of other nodes that were asked and are not known to have come to `call`."""
        asked = self._away if self._asked else [rank for rank in self._away if rank == 0 and self._appealed]
        return [rank for rank in asked if self._calls[rank] < call]

    def silent(self, least: float) -> list[int]:
        """Return the ranks of other nodes whose last word that they wait is more than `least` seconds old."""
        return [rank for rank, seconds in self._silences.items() if seconds > least]

    @property
    def heard_all_leave(self) -> bool:
        """Whether every notice of leaving that is to come here has come; some MPIs complain of what nobody receives."""
        return all(rank in self.left_ranks for rank in self._told_of_leaving)

    def failure(self, watch: Watch) -> MpidistError | None:
        """Return the error that a rank waiting in `watch` must raise because of a rank of another node.

        A verdict is told to the ranks of the board.
        """
        control = self._control
        for rank, text in self.failed_texts.items():
            return control.failures.failed(rank, text, watch)
        for rank, call in self.left_ranks.items():
            if call < watch.call:
                return control.failures.left(rank, call, watch)
            remote = control.missed.error_of(rank, watch)
            if remote is not None:  # it would have joined at its next call, but makes none
                return remote
        if self.verdict is not None:  # those beside rank 0 get no notice of it
            return control.expire(self.verdict)
        return None

    # -- the verdict of rank 0 ----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask every rank of another node where it is, and take in the answers of a moment."""
        self._asked = True
        self.tell("question")
        end = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < end:
            self.poll()
            time.sleep(0.001)

    def decide(self, watch: Watch) -> None:
        """Have it settled who is missing in the call of `watch`, and raise; return if rank 0 does not answer."""
        control = self._control
        if control.rank == 0:
            self._judge(watch.what, watch.call, watch.timeout_seconds)
        else:
            self._appeal_to_0(watch)
        if self.verdict is not None:
            raise control.expire(self.verdict)

    def _appeal_to_0(self, watch: Watch) -> None:
        control = self._control
        notice = {"kind": "appeal", "what": watch.what, "call": watch.call, "waited": watch.timeout_seconds}
        if 0 in self._calls:
            self._appealed = True
            self._tell([0], **notice)
        end = time.monotonic() + _VERDICT_SECONDS
        while self.verdict is None and time.monotonic() < end and not control.board.alarm:
            self.poll()
            time.sleep(0.001)

    def _judge(self, what: str, call: int, waited: float) -> None:
        if self._judged:
            return
        self._judged = True
        self.ask()
        control = self._control
        self.verdict = control.attendance.deadline_text(what, call, waited)
        self.tell("verdict", text=self.verdict)
