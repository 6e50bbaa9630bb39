"""Packages that an example needs beside mpidist: without one, the first rank says how to install it."""

from __future__ import annotations

import importlib.util
import os

#: How launchers number the ranks.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def packages(*names: str, install: str) -> None:
    """Exit with status 1 where one of these packages is missing; all ranks do, and one of them says why.  Local."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        rank = next((os.environ[name] for name in _RANK if name in os.environ), "0")
        raise SystemExit(f"this example needs {', '.join(missing)}: {install}" if rank == "0" else 1)


if __name__ == "__main__":
    raise SystemExit("needed.py is a part of other examples: python examples/train.py")
