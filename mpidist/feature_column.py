"""The columns of linear models, under their public name."""

from mpidist.hints import public_module
from mpidist.training.estimator.feature_columns import NumericColumn, numeric_column

__all__ = ["NumericColumn", "numeric_column"]

public_module(__name__)
