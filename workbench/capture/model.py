"""`capture`: the one function of this room. See `docs/capture.md`."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import fx, nn

from workbench.capture.atoms import atoms, layer_paths, parameter_names
from workbench.capture.attention import simplify_attention
from workbench.capture.dataflow import Dataflow, analyse, storage_of
from workbench.capture.experts import unify_experts
from workbench.capture.export import export, refuse_backward_hooks
from workbench.capture.graph import Block, Graph, spec_of
from workbench.capture.lift import Lifter
from workbench.capture.losses import label_count, mean_losses
from workbench.capture.regions import gradients_pass
from workbench.capture.under_autocast import fit_numbers, fit_types
from workbench.capture.writes import settle_writes, users_line
from workbench.errors import CaptureError
from workbench.tensors import TensorSpec


def build_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    """The model without its weights, in train mode; on the CPU where a constructor needs real numbers."""
    try:
        with torch.device("meta"):
            return factory().train()
    except Exception:  # a meta tensor's numbers were asked for; what is wrong otherwise is wrong again
        return factory().train()


def signature(model: nn.Module, batch: Mapping[str, TensorSpec]) -> str:
    """Digest of the parameters' names and shapes and the batch's fields, micro-batch size aside.

    Cheap (no export): a plan carries it, so that a plan made for another model is refused at once.
    """
    lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    lines += [f"{name} {spec.shape[1:]} {spec.dtype}" for name, spec in batch.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def capture(model: nn.Module, batch: Mapping[str, TensorSpec], *, name: str | None = None) -> Graph:
    """Capture `model(**batch)` as a graph of blocks.

    `batch` gives each keyword argument's shape *with* the leading micro-batch dim. The model is exported as it is
    (train mode, its own dropout), on whatever device its parameters live; nothing is computed.

    Raises `CaptureError` with the line of the model's code that stops it.
    """
    name = name or type(model).__name__
    if not batch:
        raise CaptureError(f"{name} was given a batch without fields. Name its inputs.", model=name)
    refuse_backward_hooks(model, name)
    exported = export(model, batch, name)
    settle_writes(exported.module, name)
    simplify_attention(exported.module)
    unify_experts(exported.module)
    fit_numbers(exported.module)
    fit_types(exported.module)
    flow = analyse(exported.module, exported.loss)
    names, ties = parameter_names(model)
    passed = _passed(exported.loss, flow)
    trained = [node for node in passed if node in flow.tensors and flow.tensors[node].requires_grad]
    trained_names = {names[id(flow.tensors[node])] for node in trained}
    if not trained:
        raise CaptureError(
            f"The loss of {name} depends on no trainable parameter. Give at least one requires_grad=True, and compute "
            f"the loss outside torch.no_grad() and without detach().",
            model=name,
        )
    losses = mean_losses(flow)
    found = atoms(flow, layer_paths(model, flow), exported.loss)
    home = {node: index for index, atom in enumerate(found) for node in atom.nodes}
    lifter = Lifter(exported.module, flow, exported.loss, names, losses)
    blocks = tuple(lifter.lift(index, atom, home) for index, atom in enumerate(found))
    parameters = {key: spec_of(key, p) for key, p in model.named_parameters()}
    used = {parameter for block in blocks for parameter in block.parameters}
    buffers = {key: spec_of(key, b) for key, b in [*model.named_buffers(), *lifter.constants.items()]}
    values = _values(blocks, home, name)
    return Graph(
        model=name,
        signature=signature(model, batch),
        micro_batch=next(iter(batch.values())).shape[0],
        blocks=blocks,
        batch=dict(batch),
        values=values,
        parameters={key: spec for key, spec in parameters.items() if key in used},
        buffers=buffers,
        ties={key: others for key, others in ties.items() if key in used},
        loss=exported.loss.name,
        label_counts=tuple(label_count(exported.module, flow, mean) for mean in losses),
        frozen=frozenset(used - trained_names),
        learned=frozenset(values) & _made_from(trained, passed, flow),
        constants=dict(lifter.constants),
    )


def _passed(loss: fx.Node, flow: Dataflow) -> set[fx.Node]:
    """What the loss reaches by differentiable operations, in-place writes included: where gradients may come back."""
    seen: set[fx.Node] = set()
    stack = [loss]
    while stack:
        node = stack.pop()
        if node in seen or not gradients_pass(node):
            continue
        seen.add(node)
        stack.extend((*node.all_input_nodes, *flow.writers.get(storage_of(node), ())))
    return seen


def _made_from(trained: Iterable[fx.Node], passed: set[fx.Node], flow: Dataflow) -> set[str]:
    """Names of the nodes in `passed` that `trained` ones reach, through whatever shares memory with a written one."""
    sharing: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in passed:
        sharing[storage_of(node)].append(node)
    seen: set[fx.Node] = set()
    stack = list(trained)
    while stack:
        node = stack.pop()
        if node in seen or node not in passed:
            continue
        seen.add(node)
        stack.extend(node.users)
        if flow.writers.get(storage_of(node)):
            stack.extend(sharing[storage_of(node)])
    return {node.name for node in seen}


def _values(blocks: tuple[Block, ...], home: Mapping[fx.Node, int], name: str) -> dict[str, TensorSpec]:
    nodes = {node.name: node for node in home}
    sent = {value: nodes[value] for block in blocks for value in block.sends}
    for node in sent.values():
        _require_fixed_size(node, name)
    return {value: spec_of(value, node.meta["val"]) for value, node in sent.items()}


def _require_fixed_size(node: fx.Node, name: str) -> None:
    """Stages exchange tensors whose sizes are known before the values are."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
        return
    line = users_line(node)
    what = "the size of a tensor" if isinstance(value, torch.Tensor) else "a Python number"
    raise CaptureError(
        f"{name} makes {what} depend on the values of a tensor in one layer{line.where} and uses it in another. "
        f"Replace a selection by a mask, and keep a number (.item()) a tensor.",
        model=name,
        file=line.file,
        line=line.number,
    )
