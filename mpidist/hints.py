"""What to use instead of a name that mpidist does not have: a hint, or the public name that is spelt alike."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection
from importlib.abc import MetaPathFinder
from typing import NoReturn

_NO_MODEL = "write the model with NumPy, autograd, JAX or PyTorch, and give its loss and gradients to mpidist.Trainer"
_NO_START = "nothing is initialized by hand: a strategy such as mpidist.MultiWorkerMirroredStrategy() joins all ranks"
_NO_BROADCAST = "variables made in strategy.scope() are alike on all ranks; see also strategy.extended.broadcast_to"
_ELSEWHERE = "optimizers, metrics, callbacks and data sets are in mpidist.optimizers, .metrics, .callbacks and .data"

#: Names below mpidist that users of other libraries type -> what to use here.  A name that becomes real has no hint.
_HINTS = {
    # TensorFlow and Keras
    "distribute": "tf.distribute.X is mpidist.X",
    "train": "use mpidist.Checkpoint, mpidist.CheckpointManager, mpidist.ClusterSpec and mpidist.optimizers",
    "Server": "no server is started by hand: ranks become servers in mpidist.ParameterServerStrategy(num_ps=1)",
    "GradientTape": "compute gradients by hand, or with autograd, JAX or PyTorch; optimizer.apply_gradients sums them",
    "function": "there are no graphs: give the plain function to strategy.run",
    "Model Sequential Module layers nn": _NO_MODEL,
    "losses": "the function that gives gradients gives the loss too; mpidist.compute_average_loss averages it",
    "Tensor constant convert_to_tensor": "values are NumPy arrays: use numpy.asarray",
    "float16 float32 float64 int32 int64": "dtypes are NumPy's, such as numpy.float32",
    "random": "use numpy.random.default_rng(seed), with the same seed on every rank",
    "summary": "use mpidist.callbacks.TensorBoard",
    "CollectiveAllReduceStrategy": "use mpidist.MultiWorkerMirroredStrategy",
    "get_loss_reduction": "gradients are summed over the replicas: divide the loss by the rows of the global batch",
    "SGD Adam AdamW Adagrad Ftrl RMSprop Dataset Callback EarlyStopping ModelCheckpoint Metric": _ELSEWHERE,
    "ClusterCoordinator PerWorkerValues RemoteValue": "it is in mpidist.coordinator",
    "PreemptionCheckpointHandler TerminationConfig partitioners": "it is in mpidist.experimental",
    "experimental.PreemptionWatcher": "use mpidist.experimental.PreemptionCheckpointHandler, which listens to signals",
    "experimental.rpc": "MPI carries the messages; mpidist.coordinator.ClusterCoordinator calls functions elsewhere",
    "optimizers.Lamb": "use mpidist.optimizers.LAMB",
    "optimizers.Adadelta optimizers.Adamax optimizers.Lion optimizers.Nadam":
        "make a subclass of mpidist.optimizers.Optimizer",
    "data.experimental": "use mpidist.data.AutoShardPolicy and mpidist.data.AUTOTUNE",
    "data.TFRecordDataset": "convert the files, and use mpidist.data.Dataset.from_hdf5 or from_npy",
    "data.TextLineDataset": "use mpidist.data.Dataset.from_text",
    "config.experimental config.set_visible_devices": "a rank drives one device, which its strategy chooses",
    "callbacks.ProgbarLogger": "use mpidist.callbacks.ProgressBar, or verbose= of fit",
    # Horovod, mpi4py, torch.distributed
    "torch": "write `import mpidist.torch`",
    "jax": "write `import mpidist.jax`",
    "init_process_group": _NO_START,
    "shutdown": "nothing is shut down by hand: the ranks part when the script ends",
    "get_rank": "use mpidist.rank()",
    "get_world_size": "use mpidist.size()",
    "cross_rank": "use mpidist.node()",
    "allgather_object": "use mpidist.all_gather_object(obj)",
    "broadcast_object_list": "use mpidist.broadcast_object(obj, root_rank=0)",
    "DistributedOptimizer DistributedDataParallel": "it is in mpidist.torch",
    "DistributedGradientTape":
        "make an optimizer of mpidist.optimizers in strategy.scope(); apply_gradients sums over all replicas",
    "allreduce": "use mpidist.all_reduce, or all_reduce of get_replica_context()",
    "allgather": "use mpidist.all_gather, or strategy.gather(value, axis=0)",
    "bcast broadcast_variables broadcast_global_variables": _NO_BROADCAST,
    "broadcast_parameters": "use mpidist.torch.broadcast_parameters",
    "torch.Adasum": "use op=Average, with a learning rate of your choice",
    "torch.join": "set optimizer.rows, 0 on a rank without rows; or use DistributedDataParallel.join",
    "torch.cross_rank": "use mpidist.node()",
    "torch.cross_size": "use size() // local_size(), where nodes have as many ranks each",
    "torch.is_homogeneous": "use len({*allgather_object(local_size())}) == 1",
    "torch.mpi_built torch.nccl_built torch.gloo_built torch.cuda_built torch.rocm_built torch.ccl_built "
    "torch.ddl_built torch.mpi_enabled torch.gloo_enabled torch.mpi_threads_supported": "leave it out: it is MPI",
    "torch.grouped_allgather torch.grouped_allgather_async torch.grouped_reducescatter "
    "torch.grouped_reducescatter_async": "make one call for each tensor",
    "torch.sparse_allreduce_async": "sparse gradients are reduced by DistributedOptimizer",
    "torch.ProcessSet torch.add_process_set torch.remove_process_set torch.global_process_set":
        "a world of some ranks is made by mpidist.new_world(comm)",
    "torch.start_timeline torch.stop_timeline": "set MPIDIST_TRACE, which writes a trace",
    "torch.elastic torch.run": "start by `mpidist run`; checkpoints may be loaded by any number of ranks",
    "MPI COMM_WORLD": "import mpi4py for calls of MPI; a strategy finds the ranks itself",
}  # fmt: skip

_HINT_OF = {name: hint for names, hint in _HINTS.items() for name in names.split()}


#: The modules that give hints.
_modules: set[str] = set()


def public_module(module: str) -> None:
    """Give a module whose public names are its ``__all__`` a ``__dir__`` of these, and a ``__getattr__`` with hints.

    Type checkers do not see them: with a ``__getattr__`` every name would be there.
    """
    vars(sys.modules[module]).update(__getattr__=missing_names(module), __dir__=lambda: _names_of(module))


def missing_names(module: str) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__`` for names it does not have: an AttributeError with a hint."""
    _modules.add(module)

    def missing(name: str) -> NoReturn:
        # with no `obj`, Python adds no suggestion of its own
        raise AttributeError(f"module {module!r} has no attribute {name!r}{_advice(module, name)}", name=name)

    return missing


def _names_of(module: str) -> list[str]:
    return sorted(sys.modules[module].__all__)


def _advice(module: str, name: str) -> str:
    """Return the end of a sentence that says what to use instead of a name; empty where nothing is known."""
    if name.startswith("_"):
        return ""
    if hint := _HINT_OF.get(f"{module}.{name}".partition(".")[2]):
        return f"; {hint}"
    names = _names_of(module)
    lowered = {public.lower(): public for public in names}
    alike = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.75)
    spelt = f"; did you mean {lowered[alike[0]]!r}?" if alike else ""
    has = f"; {module} has {', '.join(names)}" if "." in module else ""
    return spelt + has


def meant(word: str, known: Collection[str]) -> str:
    """Return which of the known words was perhaps meant, else all of them: the end of a sentence."""
    alike = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {alike[0]}?" if alike else f"expected one of {', '.join(sorted(known))}"


class _HintingFinder(MetaPathFinder):
    """Gives hints where an AttributeError does not show: ``from mpidist import keras``, ``import mpidist.keras``."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Find nothing; raise if there is a hint."""
        module, _, name = fullname.rpartition(".")
        if module in _modules and (advice := _advice(module, name)):
            raise ModuleNotFoundError(f"there is no {fullname}{advice}")


sys.meta_path.append(_HintingFinder())
