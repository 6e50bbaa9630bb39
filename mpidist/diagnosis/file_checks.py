"""Checks of files: the folder for checkpoints, its locks, and h5py."""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.diagnosis.case import Case, ranks_text
from mpidist.diagnosis.finding import Finding, fail, ok, warn

#: What should be free.
FREE_BYTES = 2**30


def check_folder(case: Case) -> Iterator[Finding]:
    """Find whether all ranks can write to the folder, and see there what others have written."""
    path, blind = case.own.folder.path, case.joint.blind if case.joint is not None else ()
    unable = [rank for rank, each in enumerate(case.ranks) if each.folder.error]
    free = min(each.folder.free_bytes for each in case.ranks)
    if unable:
        first = case.ranks[unable[0]]
        text = f"{path}: {ranks_text(unable)} ({first.host}) cannot write there: {first.folder.error}"
        yield fail(
            text, f"mkdir -p {path}" if "No such file" in first.folder.error else "mpidist doctor --folder OTHER"
        )
    elif blind:
        text = f"{path}: {', '.join(blind[:4])} does not see a file of rank 0 there; it is not shared between nodes"
        yield fail(text, "mpidist doctor --folder $SCRATCH")
    elif free < FREE_BYTES:
        yield warn(f"{path}: {free / 2**20:.0f} MiB free", f"df -h {path}")
    else:
        seen = ", seen by all nodes" if len(case.ranks_of_host) > 1 else ""
        yield ok(f"{path}: writable, {free / 2**30:.1f} GiB free{seen}")


def check_locks(case: Case) -> Iterator[Finding]:
    """Find whether files in the folder can be locked, as HDF5 does."""
    if any(each.folder.error for each in case.ranks):
        return
    error = next((each.folder.lock_error for each in case.ranks if each.folder.lock_error), "")
    off = all(each.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0") for each in case.ranks)
    if error and not off:
        yield fail(f"none in {case.own.folder.path}, and HDF5 locks: {error}", "export HDF5_USE_FILE_LOCKING=FALSE")
    elif error:
        yield ok("none there, and HDF5 is told not to lock")
    else:
        yield ok("files there can be locked")


def check_h5py(case: Case) -> Iterator[Finding]:
    """Find whether checkpoints can be written, and whether by all ranks into one file."""
    missing = [rank for rank, each in enumerate(case.ranks) if each.h5py.get("error")]
    if missing:
        first = case.ranks[missing[0]]
        yield fail(f"{ranks_text(missing)} ({first.host}): {first.h5py['error']}; no checkpoints", "pip install h5py")
    elif case.own.h5py:
        own = case.own.h5py
        kind = "with parallel I/O" if own["parallel"] else "without parallel I/O, which checkpoints do not need"
        yield ok(f"{own['version']}, HDF5 {own['hdf5']}, {kind}")
