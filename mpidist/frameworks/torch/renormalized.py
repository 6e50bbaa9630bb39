"""Embeddings that change their weights in the forward pass, by the rows of their own rank."""

from __future__ import annotations

import torch

from mpidist.frameworks.replicas import Replicas


def refuse_renormalized(replicas: Replicas, module: torch.nn.Module) -> None:
    """Raise ValueError for a trained embedding with `max_norm`, which shrinks the rows that a rank looks up.  Local."""
    if replicas.size == 1:
        return
    for name, each in module.named_modules():
        is_embedding = isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_embedding and each.max_norm is not None and each.weight.requires_grad:
            raise ValueError(
                f"'{name}' is {type(each).__name__} with max_norm={each.max_norm}: its forward pass shrinks the rows "
                "that this rank looks up, and not those of the others, so the replicas' weights would differ. Leave "
                "max_norm out, and shrink all rows on all ranks, before the first step and after each: "
                f"with torch.no_grad(): weight.renorm_({each.norm_type}, 0, {each.max_norm})"
            )
