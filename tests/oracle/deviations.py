"""Cases of ``tf_cases.json`` in which mpidist differs on purpose, each with the reason."""

from __future__ import annotations

DEVIATIONS: dict[str, str] = {
    "cal_neg_gbs": "a ValueError with TensorFlow's text: there is no InvalidArgumentError outside TensorFlow",
    "split_unbatched": "the ValueError that TensorFlow documents, in place of an IndexError from its inside",
}
