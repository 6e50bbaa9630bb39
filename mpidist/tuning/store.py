"""What `mpidist tune` measured of a set of ranks, kept from one launch to the next.

One file for each set of hosts, ranks on them, processor and MPI library: rank 0 reads it, works out what to choose, and
sends that to all.  A file that cannot be used is named in a line, and the fixed table serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.cluster.topology import Topology
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.selection import Choices, Facts
from mpidist.options import Settings, settings
from mpidist.runtime.control import Watch
from mpidist.schedules.figures import Figures
from mpidist.whole_file import written

#: To be raised when files of earlier versions of mpidist say something else than those of this one.
_FORMAT = 2

#: What stands for a set of ranks.
Key = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What a file has."""

    key: Key  # whose figures they are
    hosts: tuple[str, ...]  # the host of every rank
    figures: Figures

    def facts(self) -> Facts:
        """Return what a choice among these ranks depends on (Local)."""
        native = ("all_reduce",) if "native" in self.key["algorithms"] else ()
        return Facts(Topology(self.hosts), native, self.key["shared_memory"])


def folder(chosen: Settings | None = None) -> Path:
    """Return where the files are: ``MPIDIST_TUNING_FOLDER``, else a folder in the user's cache (Local)."""
    chosen = settings() if chosen is None else chosen
    if chosen.tuning_folder:
        return Path(chosen.tuning_folder)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        home = os.path.expanduser("~")
        cache = os.path.join(home if os.path.isabs(home) else tempfile.gettempdir(), ".cache")
    return Path(cache, "mpidist", "tuning")


def key_of(communicator: Communicator) -> Key:
    """Return what stands for the ranks of a communicator; the processor is that of this rank's host (Local)."""
    topology, facts = communicator.topology, communicator.facts()
    return {
        "hosts": sorted(topology.node_names),
        "ranks": topology.describe(),
        "processor": processor(),
        "mpi": communicator.transport.library,
        "shared_memory": facts.has_segments,
        "algorithms": list(selection.eligible(facts)),
    }


def path_of(key: Key, where: Path) -> Path:
    """Return the file of a set of ranks in the folder `where` (Local)."""
    raw = json.dumps(key, sort_keys=True).encode()
    return where / f"{hashlib.blake2b(raw, digest_size=8).hexdigest()}.json"


def read(path: Path) -> Record:
    """Return what a file has; ValueError says what is wrong in it, of another version, or of no machine (Local)."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}, that of this version of mpidist")
    try:
        key = {**content["key"]}
        hosts = tuple(str(host) for host in content["hosts"])
        if not hosts or not {"mpi", "ranks", "processor", "shared_memory", "algorithms"} <= set(key):
            raise ValueError("it does not say whose figures it has")
        record = Record(key, hosts, Figures.from_json(content["figures"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    record.figures.check(Topology(hosts))
    return record


def write(record: Record, where: Path) -> Path:
    """Write what was measured, in one step, so that nobody reads half a file; return its path (Local)."""
    path = path_of(record.key, where)
    content = {"format": _FORMAT, "key": record.key, "hosts": record.hosts, "figures": record.figures.to_json()}
    where.mkdir(parents=True, exist_ok=True)
    with written(path) as file:
        file.write(json.dumps(content).encode())
        os.chmod(file.fileno(), 0o644)  # a folder may serve several users
    return path


def look_up(key: Key, where: Path) -> tuple[Record | None, str]:
    """Return what is stored of a set of ranks, and what is wrong with it, if anything is (Local)."""
    path = path_of(key, where)
    try:
        record = read(path)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, _problem(path, error)
    if record.key != key:
        return None, f"the figures in {path} are of other ranks ({record.key})"
    return record, ""


def stored(where: Path) -> tuple[list[Record], list[str]]:
    """Return all that can be used in a folder, by name of file, and what is wrong with the rest (Local)."""
    records, problems = [], []
    for path in sorted(where.glob("*.json")):
        try:
            records.append(read(path))
        except (OSError, ValueError) as error:
            problems.append(_problem(path, error))
    return records, problems


def _problem(path: Path, error: Exception) -> str:
    return f"what mpidist tune stored in {path} cannot be used ({error})"


def load_choices(communicator: Communicator, watch: Watch) -> Choices | None:
    """Return what rank 0 makes of the figures stored of these ranks, if any, within a begun call.  Collective."""
    raw = b""
    if communicator.rank == 0:
        record, problem = look_up(key_of(communicator), folder(communicator.control.settings))
        if problem:
            communicator.control.warn(f"{problem}, so a fixed table serves; mpidist tune measures anew")
        if record is not None:
            raw = selection.worked_out(record.figures, communicator.facts()).to_bytes()
    raw = communicator.transport.exchange(raw, watch)[0]
    return Choices.from_bytes(raw) if raw else None


def processor(proc: Path = Path("/proc/cpuinfo"), cpus: Path = Path("/sys/devices/system/cpu")) -> str:
    """Return model, cores and caches in one line; the machine's type where the system tells no more (Local)."""
    caches = [_cache(index) for index in sorted(cpus.glob("cpu0/cache/index*"))]
    return ", ".join([processor_model(proc), f"{os.cpu_count()} cores", *filter(None, caches)])


def processor_model(proc: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of this machine's processor; the machine's type where the system does not tell (Local)."""
    with suppress(OSError):
        for line in proc.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _cache(index: Path) -> str:
    """Return level and size of a cache; empty for one of instructions, or one that cannot be read."""
    with suppress(OSError):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        return "" if kind == "Instruction" else f"L{level} {size}"
    return ""
