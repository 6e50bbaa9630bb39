"""The columns of linear models, under their public name."""

from typing import TYPE_CHECKING

from mpidist.hints import public_module
from mpidist.training.estimator.feature_columns import NumericColumn, numeric_column

__all__ = ["NumericColumn", "numeric_column"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
