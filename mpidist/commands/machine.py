"""What a reader of a result must know about the machine and the Python that it comes from, and when it was made."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from typing import Any

import numpy

import mpidist
from mpidist.tuning.store import processor_model


def machine() -> dict[str, Any]:
    """Return processor, cores, system and versions, and the time now.  Local."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": processor_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "mpidist": mpidist.__version__,
    }
