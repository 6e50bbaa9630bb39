"""What `AutoShardPolicy` means for a data set: its policy, and its files dealt to workers."""

from __future__ import annotations

import logging
from itertools import zip_longest

from mpidist.input.dataset import Dataset
from mpidist.input.files import FileRows
from mpidist.input.options import AutoShardPolicy
from mpidist.input.stage import Stage
from mpidist.input.zipped import Zip

_logger = logging.getLogger("mpidist")


def policy_of(dataset: Dataset) -> AutoShardPolicy:
    """Return the policy that the options of a data set name.  Local."""
    return dataset.options().experimental_distribute.auto_shard_policy


def file_count(stage: Stage) -> int:
    """Return the number of files of a data set, the smallest of its sources; 0 if one has no files.  Local."""
    return min(len(source.tables) if isinstance(source, FileRows) else 0 for source in stage.sources())


def by_file(stage: Stage, num_workers: int, index: int) -> Stage:
    """Return a tree of stages with every `num_workers`-th file, from number `index` on.  Local."""
    files = file_count(stage)
    if not files:
        kinds = ", ".join(sorted({type(source).__name__ for source in stage.sources()} - {"FileRows"}))
        raise ValueError(
            f"Found an unshardable source dataset: AutoShardPolicy.FILE deals files, and {kinds} has none; use AUTO, "
            "which deals rows"
        )
    if files < num_workers:
        raise ValueError(
            f"Could not apply FILE based sharding: the dataset only has {files} file(s), which is not enough for the "
            f"required {num_workers} shards/workers; use AUTO, which deals rows"
        )

    _check_pairs(stage)

    def some_files(source: Stage) -> Stage:
        return FileRows(source.tables[index::num_workers]) if isinstance(source, FileRows) else source

    return stage.rebuilt(some_files)


def _check_pairs(stage: Stage) -> None:
    """Raise ValueError where data sets side by side have other rows in their files: their elements would come apart."""
    for child in stage.children:
        _check_pairs(child)
    if isinstance(stage, Zip):
        first, *others = (
            [table.rows for source in child.sources() if isinstance(source, FileRows) for table in source.tables]
            for child in stage.children
        )
        for rows in others:
            for number, pair in enumerate(zip_longest(first, rows)):
                if pair[0] != pair[1]:
                    raise ValueError(
                        "AutoShardPolicy.FILE deals files, and data sets side by side (zip) have other rows in theirs: "
                        f"file {number} has {pair[0]} rows in one and {pair[1]} in another. Rows that belong together "
                        "would go to different ranks; use AUTO, which deals rows"
                    )


def warn_of_reading_all(dataset: Dataset, num_workers: int) -> None:
    """Tell, in one line, that every rank must read all files, where FILE would spare it.  Local."""
    stage, files = dataset._stage, file_count(dataset._stage)
    if num_workers > 1 and not stage.indexed and files and policy_of(dataset) is AutoShardPolicy.AUTO:
        cure = (
            "AutoShardPolicy.FILE would deal them"
            if files >= num_workers
            else f"for AutoShardPolicy.FILE there would have to be {num_workers} files"
        )
        _logger.warning(
            "AUTO sharding deals rows (DATA): behind %s every rank reads all %d files; %s",
            ", ".join(stage.words()),
            files,
            cure,
        )
