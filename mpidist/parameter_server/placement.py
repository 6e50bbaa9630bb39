"""On which server a variable lies, and which rows of it a shard has: pure arithmetic, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence


class Placement:
    """Where variables go, one after another; the same on all ranks that create the same ones."""

    #: To all servers in the order of creation, every shard for itself; or to the server that holds the fewest bytes.
    RULES = ("round_robin", "bytes")

    def __init__(self, servers: int, rule: str = "round_robin") -> None:
        if servers < 1:
            raise ValueError("There must be at least one ps.")
        if rule not in self.RULES:
            raise ValueError(f"placement must be one of {', '.join(map(repr, self.RULES))}; got {rule!r}")
        self._rule = rule
        self._placed = 0
        self._nbytes = [0] * servers

    def place(self, nbytes: int) -> int:
        """Return the server of the next variable, or shard, of `nbytes`."""
        if self._rule == "round_robin":
            server = self._placed % len(self._nbytes)
        else:
            server = min(range(len(self._nbytes)), key=self._nbytes.__getitem__)
        self.place_on(server, nbytes)
        return server

    def place_on(self, server: int, nbytes: int, counts: bool = True) -> None:
        """Take note of something that goes to a server by another rule; `counts` if it counts among them."""
        self._placed += counts
        self._nbytes[server] += nbytes


def shard_offsets(rows: int, shards: int) -> list[int]:
    """Return the first row of every shard, and `rows` at the end: as even as can be, longer ones first."""
    if not 1 <= shards <= max(rows, 1):
        raise ValueError(f"{rows} rows cannot be cut into {shards} shards")
    length, longer = divmod(rows, shards)
    offsets = [0]
    for number in range(shards):
        offsets.append(offsets[-1] + length + (number < longer))
    return offsets


def shard_count(partitions: Sequence[int], shape: Sequence[int], name: str) -> int:
    """Return how many shards a partitioner's answer means; 1 for a variable that stays whole.

    ValueError where it is not one number for each axis, or cuts another axis than the first.
    """
    if not isinstance(partitions, (list, tuple)) or len(partitions) != len(shape):
        raise ValueError(
            "`variable_partitioner` must return a list/tuple whose elements are the numbers of partitions of each "
            f"axis; for variable {name!r} of shape {tuple(shape)} it returned {partitions!r}"
        )
    if any(count > 1 for count in partitions[1:]):
        raise ValueError(
            "variables are partitioned along their first axis only; for variable "
            f"{name!r} of shape {tuple(shape)}, `variable_partitioner` returned {partitions!r}"
        )
    return max(1, min(int(partitions[0]), shape[0]))
