"""Variables that servers hold: where they lie, how workers read them, and how updates are applied."""

from mpidist.parameter_server.consistency import Asynchronous, BackupWorkers, StaleSynchronous

__all__ = ["Asynchronous", "BackupWorkers", "StaleSynchronous"]
