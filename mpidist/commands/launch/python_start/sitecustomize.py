"""What Python imports first in a rank of ``mpidist run``: it ends the job by an exception that nobody catches.

MPI's end waits for all ranks, without a limit and without a word.  A rank that has joined the others through mpidist
looks after its end itself; one that has started MPI by mpi4py alone ends the job, or leaves a note, by this.

The module takes the place of a ``sitecustomize`` that the user may have, imports that one, and leaves no trace in the
search path and in the environment, so that programs that a rank starts have none of it.  It runs in any Python 3.
"""

import atexit
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

_before, _process = sys.excepthook, os.getpid()
#: Where notes of this rank go, without their suffixes.
_notes = os.environ.pop("mpidist_notes", "")


def _end_job(kind: Any, error: BaseException, trace: Any) -> None:
    """Print the error; where it is what ends the program, have mpi4py abort the job instead of waiting in MPI's end."""
    _before(kind, error, trace)
    ends_program = getattr(sys, "last_value", None) is error and os.getpid() == _process  # by a call it ends nothing
    if ends_program and "mpi4py.MPI" in sys.modules:
        from mpi4py.run import set_abort_status

        set_abort_status(error if isinstance(error, KeyboardInterrupt) else 1)


def _note_end() -> None:
    """Note that the program is over, where `mpidist run` is on this machine and this process is what it has started."""
    try:
        with open(_notes + ".process") as note:
            is_rank = note.read().strip() == str(os.getpid())
        if is_rank:
            open(_notes + ".over", "w").close()
    except OSError:  # another machine, or a job that is being ended
        return


def _import_own() -> None:
    """Import the ``sitecustomize`` there would be without this one."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


_folder = os.path.dirname(os.path.abspath(__file__))
_first, _, _rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
if _first == _folder:
    sys.excepthook = _end_job
    atexit.register(_note_end)  # the first to be registered is the last to be called
    sys.path[:] = [each for each in sys.path if each != _folder]
    del os.environ["PYTHONPATH"]
    if _rest:
        os.environ["PYTHONPATH"] = _rest
    _import_own()
