"""Embeddings that change their weights in the forward pass, by the rows of their own rank."""

from __future__ import annotations

import torch

from mpidist.frameworks.replicas import Replicas


def refuse_row_norms(replicas: Replicas, module: torch.nn.Module) -> None:
    """Raise ValueError for a trained embedding with `max_norm`, which shrinks the rows that a rank looks up.  Local."""
    if replicas.size == 1:
        return
    for name, layer in module.named_modules():
        is_embedding = isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_embedding and layer.max_norm is not None and layer.weight.requires_grad:
            raise ValueError(
                f"'{name}' is {type(layer).__name__} with max_norm={layer.max_norm}: its forward pass shrinks the rows "
                "that this rank looks up, and not those of the others, so the replicas' weights would differ. Leave "
                "max_norm out, and shrink all rows on all ranks, before the first step and after each: "
                f"with torch.no_grad(): weight.renorm_({layer.norm_type}, 0, {layer.max_norm})"
            )
