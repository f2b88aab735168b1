"""Labels counted in each micro-batch of a batch, by the code that `workbench.capture.rowwise_head` found."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from workbench.capture.graph import Graph, LabelCount
from workbench.capture.operations import retarget
from workbench.capture.rowwise_head import find_rowwise_head


def labelled_share(graph: Graph, examples: Mapping[str, torch.Tensor]) -> float:
    """Return the largest share of labelled rows, of those that a head computes, in any micro-batch of `examples`.

    `examples` is a batch on the host; its first samples come again where they do not fill the last micro-batch. The
    share is 1 where no block may skip rows without a label.
    """
    samples = len(next(iter(examples.values())))
    filled = torch.arange(math.ceil(samples / graph.micro_batch) * graph.micro_batch) % samples
    batch = {name: field[filled] for name, field in examples.items()}
    shares = []
    for block in graph.blocks:
        if (part := find_rowwise_head(block)) is not None:
            count = on_device(graph.label_counts[block.counts[part.count]], torch.device("cpu"))
            labels = count_labels(count, batch, graph.micro_batch)
            shares.append(int(labels.max()) / part.rows)
    return max(shares, default=1.0)


def on_device(count: LabelCount, device: torch.device) -> LabelCount:
    """Return a copy whose code runs on a device."""
    return replace(
        count,
        code=code_on(count.code, device),
        of_total=None if count.of_total is None else code_on(count.of_total, device),
    )


def code_on(code: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a copy of captured code that runs on a device."""
    code = copy.deepcopy(code).to(device)
    retarget(code, device)
    return code


def count_labels(count: LabelCount, batch: Mapping[str, torch.Tensor], micro_batch: int) -> torch.Tensor:
    """Return the number of labels that count in each micro-batch of `batch`.

    The code runs once per micro-batch, because capture may have fixed the sizes that it accepts.
    """
    samples = len(next(iter(batch.values())))
    parts = [slice(first, first + micro_batch) for first in range(0, samples, micro_batch)]
    return torch.stack([count.code(*(batch[name][part] for name in count.inputs)) for part in parts])
