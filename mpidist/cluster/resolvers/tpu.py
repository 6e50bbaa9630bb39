"""The cluster of `TPUStrategy`: the ranks that MPI started, as there are no TPUs behind it."""

from __future__ import annotations

from mpidist.cluster.resolvers.mpi import MPIClusterResolver

#: Names that mean "what I was started on".
_LOCAL = (None, "", "local")


class TPUClusterResolver(MPIClusterResolver):
    """A resolver for the ranks of MPI's world, under the name that guides use for TPUs.

    Collective: every rank makes one, in the same order.

    Parameters
    ----------
    tpu : str, optional
        ``""`` or ``"local"``.

    Raises
    ------
    ValueError
        Another name: there is no service to look TPUs up in.
    """

    def __init__(self, tpu: str | None = "") -> None:
        if tpu not in _LOCAL:
            raise ValueError(
                f"there is no TPU {tpu!r} behind MPI: TPUClusterResolver stands for the ranks that a launcher started. "
                "Use TPUClusterResolver(tpu='') or 'local'"
            )
        super().__init__()

    @staticmethod
    def connect(tpu: str | None = "") -> TPUClusterResolver:
        """Return a resolver; MPI has connected the ranks.  Collective."""
        return TPUClusterResolver(tpu)
