"""Variables that servers hold: where they lie, how workers read them, and how updates are applied."""

from mpidist.hints import public_module
from mpidist.parameter_server.consistency import Asynchronous, BackupWorkers, StaleSynchronous

__all__ = ["Asynchronous", "BackupWorkers", "StaleSynchronous"]

public_module(__name__)
