"""Comparison of numbers before the first update: what was captured computes what the user's model does."""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable

import psutil
import torch
from torch import nn

from workbench.base.errors import CaptureError, PlanMismatch, in_words
from workbench.base.units import count, gib
from workbench.capture.captured_model import CapturedModel
from workbench.capture.coupling.division import (
    comparison_bytes,
    forward_flops,
    is_checked_by_plan,
    is_compared_by_plan,
)
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import CAPTURE_BATCH, MOST_TRIED_BY_PLAN, check_documents, check_labels

MOST_FLOPS_ON_CPU = 3e11
"""Operations of the forward of two samples up to which a run on CPUs compares a plan's division: some minutes on two
cores."""
MOST_TRIED_BY_RANK = 500_000_000
"""Parameters of a user-defined model up to which a rank on CPUs tries whether it sees its labels: half a minute."""
MOST_COMPARED = {"cpu": 1e11, "cuda": 6e14}
"""Operations, by type of device, up to which a graph is compared with its model: 2 s on a core (measured with GPT-2 of
5 to 81 million parameters), and 12 s on a GPU that does 50 TFLOP/s in fp32."""
ANEW = {"cpu": 1e11, "cuda": 1e14}
"""Operations in whose time a model is captured for fewer samples."""
PER_FORWARD = 12
"""Forwards of one micro-batch that take as many operations: two micro-batches, by graph and model, with backwards."""
PER_PARAMETER = 3000
"""Operations in whose time a CPU copies, changes and compares one parameter."""
FREE_SHARE = 0.8
"""Fraction of a device's free memory that a comparison may take."""


def check_numbers(experiment: Experiment, plan: Plan, captured: CapturedModel, model: nn.Module) -> None:
    """Raise unless the captured graph computes what the built model does, and its micro-batches the whole batch's loss.

    The loss and its gradients are compared on the model's device, once for each stored capture:

    - of a micro-batch, between the graph and the model's own forward, unless `wb.plan` has done so;
    - of four and six samples, between these and their micro-batches, if the graph has an operation that capture does
      not know, or the plan gathers samples, and the model was too large for `wb.plan` to compare them.

    Where this would take too much time or memory, or fails, a line in the log says so, and the run goes on. The
    captures and the copy of the model that it takes are freed again.

    Raises:
        CaptureError: the graph computes another loss, or other gradients, than the model.
        PlanMismatch: the micro-batches of the plan do not compute the loss of the whole batch.
        InvalidExperiment: the model, which was too large for `wb.plan` to find that, sees the tokens that it predicts.
    """
    graph, on_cpu = captured.graph, next(model.parameters()).device.type == "cpu"
    if MOST_TRIED_BY_PLAN < graph.parameter_count < (MOST_TRIED_BY_RANK if on_cpu else math.inf):
        check_labels(experiment, lambda: copy.deepcopy(model))
        check_documents(experiment, lambda: copy.deepcopy(model))
    is_whole = plan.micro_batch == plan.global_batch or experiment.numerics.batch_coupling == "allow"
    is_known = not plan.gathers and not graph.unknown_coupling
    if is_whole or is_known or is_compared_by_plan(graph, CAPTURE_BATCH):
        _check_graph(experiment, captured, model)
        return
    flops = forward_flops(graph) * CAPTURE_BATCH / graph.micro_batch
    told = f"the loss of micro-batches with that of a whole batch ({flops / 1e9:,.0f} GFLOP a forward)"
    if flops > MOST_FLOPS_ON_CPU and on_cpu:
        print(f"Not comparing {told}: that takes a GPU.", flush=True)
        return

    def find() -> str:
        print(f"Comparing {told}.", flush=True)
        fault = CapturedModel(experiment, CAPTURE_BATCH).fault_of(copied(model), plan.gathers)
        if not fault:
            return ""
        unknown = f" Its batch is not followed past {graph.unknown_coupling}." if graph.unknown_coupling else ""
        way = f"Plan the batch whole, wb.plan(experiment, micro_batch={plan.global_batch})"
        if not plan.gathers:
            way = "Plan again with batch_coupling='gather' in the experiment, which keeps the batch whole"
        raise PlanMismatch(
            f"The loss of {plan.model} compares samples of one batch, and the plan divides them: {fault}.{unknown} "
            f"Nothing was updated. {way}, or accept a loss that depends on the plan: batch_coupling='allow'."
        )

    _compare(captured, "gathered" if plan.gathers else "divided", told, find)


def _check_graph(experiment: Experiment, captured: CapturedModel, model: nn.Module) -> None:
    """Raise `CaptureError` unless the graph of a micro-batch computes what the model does, if that is not known.

    The graph of the plan's micro-batch is compared, or of fewer samples if that takes too much, or less time.
    """
    graph, device = captured.graph, next(model.parameters()).device
    on_cpu, told = device.type == "cpu", "the captured graph with the model itself"
    few = min(CAPTURE_BATCH, graph.micro_batch)
    if on_cpu and experiment.numerics.batch_coupling != "gather" and is_checked_by_plan(graph, CAPTURE_BATCH):
        return

    def flops(samples: int) -> float:
        return forward_flops(graph) * samples / graph.micro_batch

    def operations(samples: int) -> float:
        return PER_FORWARD * flops(samples) + PER_PARAMETER * graph.parameter_count * on_cpu

    def find() -> str | None:
        obstacle = ""
        is_quicker = operations(few) + ANEW[device.type] < operations(graph.micro_batch)
        for samples in (few,) if is_quicker else dict.fromkeys((graph.micro_batch, few)):
            needed = comparison_bytes(graph, samples)
            if operations(samples) > MOST_COMPARED[device.type]:
                gflop, parameters = flops(samples) / 1e9, count(graph.parameter_count)
                obstacle = f"{gflop:,.0f} GFLOP a forward and {parameters} parameters take too long"
            elif needed > (free := free_bytes(device)):
                obstacle = f"it needs about {gib(needed)} of {device.type} memory, of which {gib(free)} are free"
            else:
                break
        else:
            print(f"Not comparing {told}: {obstacle}.", flush=True)
            return None
        begun = time.perf_counter()
        asked = captured if samples == graph.micro_batch else CapturedModel(experiment, samples, model)
        try:
            _ = asked.graph
        except CaptureError as error:
            return f"it is not captured for {samples} samples: {error}"
        if obstacle := asked.check_graph(lambda: copied(model)):
            return obstacle
        seconds = time.perf_counter() - begun
        print(f"Compared {told}: equal loss and gradients of {samples} samples, in {seconds:.1f} s.", flush=True)
        return ""

    _compare(captured, "compared", told, find)


def _compare(captured: CapturedModel, question: str, told: str, find: Callable[[], str | None]) -> None:
    """Print why a comparison was not made, which `find` returns, if it does not raise that numbers differ."""

    def found() -> str | None:
        try:
            return find()
        except (CaptureError, PlanMismatch):
            raise
        except Exception as error:
            message = f"it failed, and the run goes on without: {in_words(error)}"
            if not isinstance(error, torch.OutOfMemoryError | MemoryError):
                return message
            print(f"Not comparing {told}: {message}.", flush=True)  # there may be room another time
            return None
        finally:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    if reason := captured.compared(question, found):
        print(f"Not comparing {told}: {reason}.", flush=True)


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model, also of one whose modules hold tensors that were computed from its weights."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return copy.deepcopy(model, {id(each): each.detach().clone() for each in held if not each.is_leaf})


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that a comparison may take."""
    if device.type == "cpu":
        return int(FREE_SHARE * psutil.virtual_memory().available)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(FREE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
