"""The scalars that a model logs in a step, from the values of each micro-batch to one figure each.

A block's forward writes a value to its place in a table, by micro-batch: a second forward (a loss over all samples, a
search for the first non-finite value) writes the same place again, and a recomputation in the backward none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from workbench.capture import Graph
from workbench.capture.graph import LabelCount


class StepScalars:
    """The logged scalars of one rank, under the rules of `workbench.log_scalar`."""

    def __init__(self, graph: Graph, num_microbatches: int, replicas: int, tensor: int, device: torch.device) -> None:
        """`graph` is the model's; the step has `num_microbatches` on each replica of `tensor` devices a stage."""
        self._calls, self._replicas, self._tensor = graph.scalars, replicas, tensor
        self._rows = {call.value: row for row, call in enumerate(self._calls)}
        self._table = self._values = torch.zeros(len(self._calls), num_microbatches, device=device)
        self._own = torch.zeros(len(self._calls), dtype=torch.bool)
        """True for the calls that this rank's blocks make."""
        self._weights: list[torch.Tensor] = []
        """Labels of each micro-batch over their mean number, for each mean loss."""
        whole = set(graph.blocks[-1].sends) if graph.gathered else set()
        self._reduce = ["mean" if call.value in whole else call.reduce for call in self._calls]  # of the whole batch
        names = list(dict.fromkeys(call.name for call in self._calls))
        largest = {call.name for call, how in zip(self._calls, self._reduce, strict=True) if how in ("max", "min")}
        self.names = (*(n for n in names if n not in largest), *(n for n in names if n in largest))
        """Names of the figures, those that are the largest or smallest value last."""
        self.num_sums = len(names) - len(largest)
        """Number of figures that are sums over the ranks."""

    def divide(self, num_microbatches: int) -> None:
        """Prepare a step that has so many micro-batches on each replica, at most those of the plan."""
        self._values = self._table[:, :num_microbatches]

    def collect(self, microbatch: int, sent: Mapping[str, torch.Tensor]) -> None:
        """Keep what a block sends and logs for a micro-batch."""
        for name in sent.keys() & self._rows.keys():
            row = self._rows[name]
            self._own[row] = True
            self._values[row, microbatch].copy_(sent[name].detach())

    def weigh(
        self,
        denominators: list[torch.Tensor],
        counts: Sequence[LabelCount],
        labels: Sequence[torch.Tensor],
        gathers: bool,
    ) -> None:
        """Note how micro-batches are weighted, and put ratios in place of the denominators of losses that scalars read.

        `denominators` are those of the mean losses, whose labels in each micro-batch are `labels`. A plan that
        `gathers` computes its losses over all samples of a step.
        """
        self._weights = []
        for index, (count, own) in enumerate(zip(counts, labels, strict=True)):
            here = torch.stack([count.divisor(each) for each in own.float()])
            self._weights.append(torch.ones_like(here) if gathers else here / denominators[index])
            if count.is_ratio:
                denominators[index] = torch.ones_like(here) if gathers else denominators[index] / here

    def shares(self, is_last_replica: bool) -> list[torch.Tensor]:
        """Return this rank's share of each figure that is a sum over the ranks."""
        parts = {name: list[torch.Tensor]() for name in self.names[: self.num_sums]}
        calls = {name: sum(call.name == name for call in self._calls) for name in parts}
        microbatches = self._values.shape[1] * self._replicas
        for row, (call, how) in enumerate(zip(self._calls, self._reduce, strict=True)):
            if call.name not in parts or not self._own[row]:
                continue
            values = self._values[row]
            if how == "mean":
                weight = None if call.count is None else self._weights[call.count]
                # The mean over no label is not a number, and does not count.
                weighted = values if weight is None else torch.where(weight == 0, 0.0, values * weight)
                part = weighted.sum() / (microbatches * calls[call.name])
            elif how == "sum":
                part = values.sum()
            else:
                is_last = is_last_replica and call is next(c for c in reversed(self._calls) if c.name == call.name)
                part = values[-1] if is_last else torch.zeros_like(values[-1])
            parts[call.name].append(part / self._tensor)
        zero = torch.zeros((), device=self._values.device)
        return [sum(found, start=zero) for found in parts.values()]

    def extremes(self) -> torch.Tensor:
        """Return the largest or smallest value over all ranks of each of the other figures; a collective."""
        figures, signs = [], []
        for name in self.names[self.num_sums :]:
            rows = [row for row, call in enumerate(self._calls) if call.name == name]
            sign = -1.0 if self._calls[rows[0]].reduce == "min" else 1.0
            own = [(sign * self._values[row]).max() for row in rows if self._own[row]]
            least = torch.full((), -torch.inf, device=self._values.device)
            figures.append(torch.stack([least, *own]).max())
            signs.append(sign)
        found = torch.stack(figures)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found * torch.tensor(signs, device=found.device)
