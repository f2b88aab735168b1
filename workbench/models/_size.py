"""The size of a model as scaling laws count it."""

from __future__ import annotations

import dataclasses
import functools

from workbench.arguments import checked_arguments
from workbench.models._named import Model


@checked_arguments
def parameters_without_embeddings(model: Model) -> int:
    """Return the number of a model's parameters without its embedding tables: those of tokens, positions, segments.

    A read-out that shares the table of the tokens is not counted either. Kaplan et al. (arXiv:2001.08361) count so,
    because the losses of models of different depth lie on one curve only then.
    """
    return _count(dataclasses.replace(model, initial_scale=None))


@functools.lru_cache(maxsize=256)
def _count(model: Model) -> int:
    import torch

    with torch.device("meta"):
        module = model.build()
    tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    return sum(each.numel() for each in module.parameters() if id(each) not in tables)
