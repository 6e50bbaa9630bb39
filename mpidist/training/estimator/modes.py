"""`ModeKeys`: what a model function is called for."""

from __future__ import annotations


class ModeKeys:
    """The modes of a model function, as TensorFlow spells them.

    Attributes
    ----------
    TRAIN : str
        ``"train"``.
    EVAL : str
        ``"eval"``.
    PREDICT : str
        ``"infer"``.
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


#: All of them.
MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
