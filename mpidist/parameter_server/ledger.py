"""`Ledger`: the words by which a server and the clients on its node know how far things are."""

from __future__ import annotations

from typing import Any

from mpidist.runtime.shared_memory import LINE_WORDS, WORD_BYTES

#: How many optimizers of a server have their steps in the ledger.
LEDGER_OPTIMIZERS = 64


class Ledger:
    """Words that say how far a server is, and who may change its variables.

    Its clients on the same node read them, and write those of what they have changed themselves, see `Direct`.
    """

    #: Number of the layout; how often an optimizer got another rule or schedule; whether anything is torn; whether the
    #: server waits for a copy that clients have pinned.
    LAYOUT, RULES, TORN, SHORT = 0, 1, 2, 3
    #: 1 + the rank with the write lock; pushes that are done with; how often a client has set a learning rate itself.
    HELD, PUSHES, RATES = LINE_WORDS, LINE_WORDS + 1, LINE_WORDS + 2
    _STEPS = 2 * LINE_WORDS

    _RATES = _STEPS + LEDGER_OPTIMIZERS
    _CLIENTS = _RATES + LEDGER_OPTIMIZERS

    def __init__(self, memory: Any, clients: int) -> None:
        view = memoryview(memory)[: self.nbytes(clients)]
        self.words = view.cast("q")
        #: The same as floats.
        self.reals = view.cast("d")

    @classmethod
    def nbytes(cls, clients: int) -> int:
        """Return the size in bytes of a ledger for so many clients."""
        return WORD_BYTES * cls.applied_word(clients)

    @classmethod
    def applied_word(cls, client: int) -> int:
        """Return the index in `words` of how many pushes of a client are done with; what it may push follows it."""
        return cls._CLIENTS + client * LINE_WORDS

    @classmethod
    def steps_word(cls, optimizer: int) -> int:
        """Return the index in `words` of the steps that an optimizer has made."""
        return cls._STEPS + optimizer

    @classmethod
    def rate_real(cls, optimizer: int) -> int:
        """Return the index in `reals` of an optimizer's learning rate, NaN where it is a function of the steps."""
        return cls._RATES + optimizer
