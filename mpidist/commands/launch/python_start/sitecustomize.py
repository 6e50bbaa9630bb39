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

_process = os.getpid()
#: Where notes of this rank go, without their suffixes.
_notes = os.environ.pop("mpidist_notes", "")


def _at_end() -> None:
    """Where an exception ends the program, have mpi4py abort the job in place of MPI's end; note that it is over."""
    if os.getpid() != _process:  # a forked child
        return
    if "mpi4py.MPI" in sys.modules and _is_ended_by_exception():
        from mpi4py.run import set_abort_status

        set_abort_status(sys.last_value if isinstance(sys.last_value, KeyboardInterrupt) else 1)
    _note_end()


def _is_ended_by_exception() -> bool:
    """Return whether the last exception that Python printed has gone through all of the program.

    The hook for exceptions is the program's: it may have another.  Others are printed, too, upon which a program goes
    on: of C's calls, which have a caller, of its threads, which do not begin with a program, and at a prompt.
    """
    trace = getattr(sys, "last_traceback", None)
    if trace is None or hasattr(sys, "ps1"):
        return False
    first = trace.tb_frame
    return first.f_back is None and first.f_code.co_name in ("<module>", "_run_module_as_main")


def _note_end() -> None:
    """Note that the program is over, where `mpidist run` is on this machine and this process is what it has started."""
    try:
        with open(_notes + ".process", "rb") as note:
            is_rank = note.read().strip() == b"%d" % _process
        if is_rank:
            open(_notes + ".over", "wb").close()
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
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
# another's start of Python may have come before it
_own = [path for path in _paths if path and os.path.abspath(path) == _folder]
if _own:
    atexit.register(_at_end)  # the first to be registered is the last to be called
    sys.path[:] = [path for path in sys.path if path not in (_folder, *_own)]
    del os.environ["PYTHONPATH"]
    _rest = [path for path in _paths if path not in _own]
    if _rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(_rest)
    _import_own()
