"""What one rank sees of itself and of its machine, for `mpidist doctor`; nothing is sent to others here."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy

import mpidist
from mpidist.cluster.devices import may_see_gpus
from mpidist.commands.card_page import ask_cuda
from mpidist.commands.info import find_h5py
from mpidist.commands.launch.cores import visible_cores
from mpidist.commands.launch.probe import without_launcher
from mpidist.diagnosis.case import Folder, Observation
from mpidist.options import RUN_FOLDER, RUN_TOKEN
from mpidist.runtime.memory_room import room_bytes

#: How the variables begin that findings look at.
_VARIABLES = (
    *("MPIDIST_", "OMP_NUM_THREADS", "OMPI_MCA_btl_tcp", "OMPI_MCA_oob_tcp", "UCX_NET", "NCCL_SOCKET", "GLOO_SOCKET"),
    *("HDF5_USE_FILE_LOCKING", "SLURM_HET_SIZE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST_", "SLURM_NTASKS"),
    *("PMIX_NAMESPACE", "PMI_FD", "PMI_RANK", "PMI2_PMRANK"),
)

#: Variables of which each rank has its own.
_OWN = (RUN_TOKEN, RUN_FOLDER)

#: Files of libraries for linear algebra, and the functions that tell how many threads they have.
_LIBRARY = re.compile(r"(openblas|mkl_rt|blis)[^/]*$")
_COUNTERS = (
    *(f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")),
    *("MKL_Get_Max_Threads", "bli_thread_get_num_threads"),
)

#: What to ask the system about an interface: its address.
_SIOCGIFADDR = 0x8915

#: So long is waited for the answer about GPU memory.
_CARD_SECONDS = 60

#: Sends an array in GPU memory to itself.  An MPI that takes it for one of the host ends this child.
_CARD_CHILD = """
import cupy
from mpi4py import MPI
there, back = cupy.arange(1024.0), cupy.zeros(1024)
MPI.COMM_SELF.Sendrecv(there, 0, recvbuf=back, source=0)
print("yes" if bool((there == back).all()) else "wrong values")
"""


def observe(folder: str, mpi: str, asks_mpi: bool) -> Observation:
    """Return what this process sees.  Local.

    `folder` is that for checkpoints, `mpi` the vendor and version of MPI, as far as they are known.  With `asks_mpi` a
    child process asks MPI about arrays in GPU memory.
    """
    cores, h5py = visible_cores(), find_h5py()
    has_driver = may_see_gpus(is_installed=lambda package: True)
    cuda = ask_cuda() if has_driver else {}
    return Observation(
        host=platform.node(),
        software=_software(mpi, h5py.get("version", "none")),
        environ=_environ(),
        processors=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        core_count=cores.count,
        machine_processors=os.cpu_count() or 1,
        threads=_threads(),
        shared_memory=_shared_memory(),
        memory_bytes=room_bytes(),
        limits=_limits(),
        interfaces=_interfaces(),
        ports=_ports(),
        h5py=h5py,
        folder=_folder(folder),
        has_driver=has_driver,
        cuda=cuda,
        mpi_takes_cards=_asks_about_cards() if asks_mpi and cuda.get("cards") else "",
    )


def _software(mpi: str, h5py: str) -> dict[str, str]:
    return {
        "mpidist": mpidist.__version__,
        "mpidist's path": os.path.dirname(mpidist.__file__),
        "Python": platform.python_version(),
        "Python's path": sys.executable,
        "NumPy": numpy.__version__,
        "mpi4py": _version("mpi4py"),
        "MPI": mpi,
        "h5py": h5py,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _environ() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES) and name not in _OWN}
    return {**found, "PWD": _working_folder()}


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        return f"none ({error.strerror})"


def _threads() -> int | None:
    """Return how many threads NumPy's linear algebra has, by the word of its library."""
    numpy.ones((2, 2)) @ numpy.ones((2, 2))
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = {line.split(maxsplit=5)[-1] for line in lines if _LIBRARY.search(line)}
        libraries = list(map(ctypes.CDLL, sorted(mapped)))
    except OSError:
        return None
    found = [[getattr(each, name) for name in _COUNTERS if hasattr(each, name)] for each in libraries]
    return max((functions[0]() for functions in found if functions), default=None)


def _shared_memory() -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.total, usage.free


def _limits() -> dict[str, int | None]:
    kinds = {"memory": resource.RLIMIT_AS, "locked": resource.RLIMIT_MEMLOCK, "files": resource.RLIMIT_NOFILE}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def _interfaces() -> tuple[str, ...]:
    """Return the interfaces, without the loopback, that have an IPv4 address."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return tuple(name for name in names if _has_address(asked, name))


def _has_address(asked: socket.socket, name: str) -> bool:
    try:
        fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return False
    return True


def _ports() -> tuple[str, ...]:
    """Return the active ports of InfiniBand."""
    ports = []
    for path in sorted(Path("/sys/class/infiniband").glob("*/ports/*/state")):
        try:
            is_active = "ACTIVE" in path.read_text()
        except OSError:
            continue
        ports += [f"{path.parts[-4]}:{path.parts[-2]}"] if is_active else []
    return tuple(ports)


def _folder(path: str) -> Folder:
    """Write and lock a file in a folder, and remove it."""
    try:
        path = os.path.abspath(path)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".mpidist-doctor-") as file:
            file.write(b"written")
            file.flush()
            lock_error = _lock_error(file.fileno())
        return Folder(path, lock_error=lock_error, free_bytes=shutil.disk_usage(path).free)
    except OSError as error:
        return Folder(path, error=error.strerror or str(error))


def _lock_error(file: int) -> str:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "") + f" {error.strerror}"
    return ""


def _asks_about_cards() -> str:
    """Return "yes", or why MPI does not take arrays in GPU memory, by the end of a child that tries."""
    command, environ = [sys.executable, "-c", _CARD_CHILD], without_launcher(os.environ)
    try:
        child = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_CARD_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {_CARD_SECONDS} s"
    if child.returncode < 0:
        return f"a process that tried ended by signal {-child.returncode}"
    lines = (child.stdout if child.returncode == 0 else child.stderr).strip().splitlines()
    return lines[-1] if lines else f"status {child.returncode}"
