"""An unmodified model -> a `Graph` of `Block`s.

    graph = capture(model, {"input_ids": TensorSpec(…), …})

Works on a model built on the meta device (2.46 B parameters in seconds, no weights) as on a real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.capture.graph import Block, Graph, LabelCount, spec_of

if TYPE_CHECKING:
    from workbench.capture.model import build_meta, capture, signature

__all__ = ["Block", "Graph", "LabelCount", "build_meta", "capture", "signature", "spec_of"]


def __getattr__(name: str) -> object:
    if name in ("capture", "build_meta", "signature"):
        from workbench.capture import model

        return getattr(model, name)
    raise AttributeError(name)
