"""Callbacks with Keras' names, alike on all ranks; and the slow replica that they may ask the trainer for."""

from __future__ import annotations

from mpidist.training.callbacks.base import Callback, History, LambdaCallback
from mpidist.training.callbacks.csv_logger import CSVLogger
from mpidist.training.callbacks.early_stopping import EarlyStopping, TerminateOnNaN
from mpidist.training.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau
from mpidist.training.callbacks.model_checkpoint import BackupAndRestore, ModelCheckpoint
from mpidist.training.callbacks.progress_bar import ProgressBar
from mpidist.training.callbacks.report import Report
from mpidist.training.callbacks.tensorboard import TensorBoard
from mpidist.training.own_time import SlowReplica

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ProgressBar",
    "ReduceLROnPlateau",
    "Report",
    "SlowReplica",
    "TensorBoard",
    "TerminateOnNaN",
]
