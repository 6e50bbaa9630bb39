"""Variables that servers hold: where they lie, how workers read them, and how updates are applied."""

from typing import TYPE_CHECKING

from mpidist.hints import public_module
from mpidist.parameter_server.consistency import Asynchronous, BackupWorkers, StaleSynchronous

__all__ = ["Asynchronous", "BackupWorkers", "StaleSynchronous"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
