"""Capture of a model as a graph of blocks, step by step. `docs/capture.md` describes each step.

`torch.export` runs the model's own Python once (`export/exporting.py`), the graph is rewritten in place
(`export/rewrites.py`), its mean losses, couplings and scalars are found (`losses.py`, `coupling/batch_coupling.py`),
and its nodes are cut into blocks (`blocks/block_extraction.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.nn.parameter import is_lazy

from workbench.base.errors import CaptureError, InvalidExperiment
from workbench.base.tensors import TensorSpec, spec_of
from workbench.base.user_code import line_of_node
from workbench.capture.blocks.block_extraction import (
    BlockExtractor,
    NodeGroup,
    canonical_names,
    find_layers,
    group_nodes,
)
from workbench.capture.coupling.batch_coupling import MADE_ANEW, Coupling, batch_coupling, batch_norms, described
from workbench.capture.coupling.gathering import split_tail
from workbench.capture.export.aliasing import memory_of, move_meta_to_cpu
from workbench.capture.export.exporting import Exported, export
from workbench.capture.export.opaque import call_of
from workbench.capture.export.opaque_search import SIZES, OpaqueSearch
from workbench.capture.export.rewrites import rewrite
from workbench.capture.graph import Graph, SampleDim, ScalarValue, signature
from workbench.capture.losses import MeanLoss, MicroBatchMean, Quotient, Scalar, label_count, mean_losses, scalars_of
from workbench.capture.operations import (
    Dataflow,
    analyse_dataflow,
    ancestors,
    descendants,
    is_random,
    mutated_arguments,
    op_name,
    passes_gradient,
    reachable,
    shape_of,
    storage_of,
)
from workbench.capture.outputs import LossChoice, Outputs
from workbench.capture.torch_internals import forgotten_by_dynamo, refuse_backward_hooks


@forgotten_by_dynamo()
def capture(
    model: nn.Module,
    batch: Mapping[str, TensorSpec],
    *,
    name: str | None = None,
    loss: LossChoice = None,
    returns: Callable[[Any], Mapping[int, str]] | None = None,
    gathers: bool = False,
    logs: bool = False,
    examples: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """Capture `model(**batch)` as a graph of blocks.

    If a layer uses a size that depends on values of another, the module around both becomes opaque.

    The model is exported as it is (train mode, its own dropout), on the device of its parameters; nothing is computed.
    What lies on the meta device is moved to the CPU without values, so that operations and blocks are those that a rank
    captures: a tensor that forward makes of numbers, a table from NumPy, sizes that depend on values.

    Args:
        batch: the shape of each keyword argument, *with* the leading micro-batch dim.
        name: the model's name in errors; its class by default.
        loss: the loss in what forward returns: a name, an index, or a function of the outputs and the batch.
        returns: function that is given what forward returned, with a `Slot` for each tensor, and returns the slots to
            compute beside the loss, each with the name of who reads it.
        gathers: cut the part of the loss that compares samples off, as the last block
            (`workbench.capture.coupling.gathering`). It computes the returned slots, too, of the whole batch.
        logs: compute what forward logs (`workbench.log_scalar`), too.
        examples: samples of the data, which tell how many items of each sample a mask selects.

    Raises:
        CaptureError: the model cannot be captured; names the line of its code that stops it.
    """
    name = name or type(model).__name__
    if not batch:
        raise CaptureError(f"{name} was given a batch without fields. Name its inputs.")
    if lazy := next((key for key, tensor in _registered(model) if is_lazy(tensor)), ""):
        raise CaptureError(
            f"{lazy} of {name} has no shape before the first forward: a lazy module makes it then, after the optimizer "
            "was made. Call the model once in the function that builds it: model(**batch); return model."
        )
    _refuse_shared_memory(model, name)
    refuse_backward_hooks(model, name)
    move_meta_to_cpu(model)
    search = OpaqueSearch(model, name, examples)
    while True:
        exported = export(search, batch, loss, returns is not None, logs)
        try:
            return _graph_of(exported, model, batch, name, loss, returns, gathers, search)
        except CaptureError as error:
            if "inside" not in error.facts or not search.adds(error):
                raise


def _graph_of(
    exported: Exported,
    model: nn.Module,
    batch: Mapping[str, TensorSpec],
    name: str,
    loss: LossChoice,
    returns: Callable[[Any], Mapping[int, str]] | None,
    gathers: bool,
    search: OpaqueSearch,
) -> Graph:
    """Return the graph of blocks of an exported model.

    Raises `InvalidExperiment` if an evaluation reads a parameter, or a value that was computed from a mean loss.
    """
    rewrite(exported.module, name)
    readers = {} if returns is None else returns(exported.template)
    outputs = {index: exported.returned[index] for index in readers}
    graph = exported.module.graph
    for index, node in outputs.items() if gathers else ():
        if (
            node.op == "call_function"
        ):  # an alias at the end of the graph belongs to the tail, which has the whole batch
            with graph.inserting_before(graph.output_node()):
                alias = graph.call_function(torch.ops.aten.alias.default, (node,))
            alias.meta = {key: value for key, value in node.meta.items() if key != "nn_module_stack"}
            outputs[index] = alias
    flow = analyse_dataflow(exported.module, exported.loss, outputs.values())
    means = mean_losses(flow)
    coupling = batch_coupling(flow, exported.loss, [mean.node for mean in means])
    losses: tuple[MeanLoss | Quotient, ...] = (*means, *coupling.quotients)
    after_losses = set().union(*(descendants(mean.node) | {mean.node} for mean in losses))
    for index, node in outputs.items():
        if node in after_losses:  # mean losses are divided by the labels of the whole set, not of one micro-batch
            raise InvalidExperiment(
                f"{readers[index]} reads a loss that forward returned, and evaluations compute it over the whole set "
                "only (run.evaluations().eval_loss). Let it read the logits instead."
            )
        if node in flow.tensors:
            raise InvalidExperiment(
                f"{readers[index]} reads a parameter or buffer that forward returned, which evaluations do not "
                "gather. Let forward return a value that it computes."
            )
    scalars = scalars_of(exported, flow, losses, outputs.values())
    if scalars:
        needed = ancestors([exported.loss, *outputs.values()])  # other means are those of a micro-batch
        means = tuple(mean for mean in means if mean.node in needed)
        coupling = replace(coupling, quotients=tuple(each for each in coupling.quotients if each.node in needed))
        flow = analyse_dataflow(exported.module, exported.loss, [*outputs.values(), *(s.node for s in scalars)])
    analysis = _Analysis(search, name, batch, loss, exported, flow, outputs, means, coupling, scalars, model.training)
    return analysis.tower_and_tail() if gathers else analysis.graph(analysis.groups)


def _registered(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _refuse_shared_memory(model: nn.Module, name: str) -> None:
    """Raise `CaptureError` for a parameter whose memory is also that of another parameter or buffer.

    Each would be a tensor of its own on the ranks, and part from the other with the first update. Weights that lie one
    after the other in one piece of memory, as cuDNN wants those of a recurrent layer, do not overlap.
    """
    seen: dict[int, list[tuple[int, int, str, bool]]] = defaultdict(list)
    for key, tensor in _registered(model):
        if tensor.layout != torch.strided or not tensor.numel():
            continue
        first = int(tensor.storage_offset())
        last = first + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        place, is_parameter = seen[memory_of(tensor) or 0], isinstance(tensor, nn.Parameter)
        for start, end, other, is_other in place:
            if start <= last and first <= end and (is_parameter or is_other):
                way = (
                    "Tie them: give one module the parameter of the other itself, decoder.weight = embedding.weight, "
                    "and not nn.Parameter(embedding.weight.data)."
                    if is_parameter and is_other
                    else "Make it a plain attribute, and no buffer: self.copy = self.weight.data follows the updates."
                )
                raise CaptureError(
                    f"{key} and {other} of {name} are two tensors in the same memory, and would part with the first "
                    f"update. {way}"
                )
        place.append((first, last, key, is_parameter))


@dataclass(frozen=True)
class _Analysis:
    """An exported graph with all that is known of it."""

    search: OpaqueSearch
    name: str
    batch: Mapping[str, TensorSpec]
    loss_choice: LossChoice
    exported: Exported
    flow: Dataflow
    outputs: Mapping[int, fx.Node]
    means: Sequence[MeanLoss]
    coupling: Coupling
    scalars: Sequence[Scalar]
    in_training: bool

    @property
    def model(self) -> nn.Module:
        return self.search.model

    def of_more_samples(self, names: Mapping[int, str]) -> CarriedState | None:
        """Return the state that a forward of twice as many samples carries; None if there is no such forward."""
        batch = {key: replace(spec, shape=(2 * spec.shape[0], *spec.shape[1:])) for key, spec in self.batch.items()}
        try:
            exported = export(self.search, batch, self.loss_choice, False)
        except CaptureError:
            return None
        rewrite(exported.module, self.name)
        return carried_state(analyse_dataflow(exported.module, exported.loss), exported.loss, names, self.name)

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The groups of nodes that become blocks."""
        layers = find_layers(self.model, self.flow)
        return group_nodes(self.flow, layers, self.exported.loss, self.in_training)

    def tower_and_tail(self) -> Graph:
        """Return the graph with the part of its loss that compares samples as the last block."""
        outputs = self.outputs.values()
        of_loss = (self.exported.loss, self.means, outputs)
        return self.graph(*split_tail(self.flow, *of_loss, self.groups, self.name, self.in_training))

    def graph(self, groups: Sequence[NodeGroup], gathered: tuple[SampleDim, ...] = ()) -> Graph:
        """Return the graph whose blocks are these groups."""
        model, flow, exported, coupling, outputs = self.model, self.flow, self.exported, self.coupling, self.outputs
        # Names and gradients of parameters and buffers.
        every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        names, ties = canonical_names(every)
        state = carried_state(flow, exported.loss, names, self.name)
        if state.of_forwards and self.in_training and (other := self.of_more_samples(names)) is not None:
            state = state.compared_with(other)
        trained, differentiated = _with_gradients(exported, flow, names)
        if not trained:
            raise CaptureError(
                f"The loss of {self.name} depends on no trainable parameter. Give at least one requires_grad=True, and "
                f"compute the loss outside torch.no_grad() and without detach()."
            )
        # Blocks, and the values that they send.
        of_micro_batch = {mean.node: mean for scalar in self.scalars for mean in scalar.micro_batch_means}
        losses: list[MeanLoss | Quotient | MicroBatchMean] = [
            *self.means,
            *coupling.quotients,
            *of_micro_batch.values(),
        ]
        group_of = {node: index for index, group in enumerate(groups) for node in group.nodes}
        logged = [scalar.node for scalar in self.scalars]
        extractor = BlockExtractor(exported, flow, names, losses, [*outputs.values(), *logged])
        blocks = tuple(extractor.extract(index, group, group_of) for index, group in enumerate(groups))
        used = {parameter for block in blocks for parameter in block.parameters}
        buffers = {key: spec_of(key, b) for key, b in [*model.named_buffers(), *extractor.constants.items()]}
        nodes = {node.name: node for node in (*group_of, *outputs.values(), *logged)}
        values = {value: _sent_value(nodes[value], self.name) for block in blocks for value in block.sends}
        # Sentences for plans that divide the batch.
        notes_if_divided: tuple[str, ...] = ()
        notes_if_accumulated: tuple[str, ...] = ()
        if norms := batch_norms(flow, exported.loss):
            notes_if_divided = (
                f"BatchNorm ({norms} layer{'s' * (norms > 1)}) takes its statistics from one micro-batch, as plain "
                "PyTorch does that accumulates gradients.",
            )
        if state.of_forwards:
            counted, *others = state.of_forwards
            more = f" (and {len(others)} more)" if others else ""
            notes_if_accumulated = (
                f"The loss depends on how often forward has run: {counted}{more}, advances with each "
                "micro-batch, as in plain PyTorch that accumulates gradients. With one micro-batch a replica it "
                "advances once a step.",
            )
        return Graph(
            model=self.name,
            signature=signature(model, self.batch),
            micro_batch=next(iter(self.batch.values())).shape[0],
            blocks=blocks,
            batch=dict(self.batch),
            values=values,
            parameters={key: spec_of(key, p) for key, p in model.named_parameters() if key in used},
            buffers=buffers,
            ties={key: others for key, others in ties.items() if key in used},
            loss=exported.loss.name,
            label_counts=tuple(label_count(exported.module, flow, mean) for mean in losses),
            frozen=frozenset(used - {names[id(flow.tensors[node])] for node in trained}),
            differentiated=frozenset(values) & differentiated,
            constants=dict(extractor.constants),
            coupled=(*coupling.lines, *(f"{each}, and read again by the next forward" for each in state.of_samples)),
            unknown_coupling=coupling.unknown,
            gathered=gathered,
            notes=exported.notes,
            notes_if_divided=notes_if_divided,
            notes_if_accumulated=notes_if_accumulated,
            loss_choice=self.loss_choice,
            outputs=Outputs(exported.template, {at: node.name for at, node in outputs.items()}) if outputs else None,
            scalars=tuple(
                ScalarValue(s.name, s.reduce, s.node.name, None if s.loss is None else losses.index(s.loss))
                for s in self.scalars
            ),
            tower_and_tail=self.tower_and_tail if (coupling.lines or coupling.unknown) and not gathered else None,
        )


# Buffers that carry a value from one forward to the next: forward writes them, and what they hold reaches its loss.

_OVERWRITES = ("copy_", "fill_", "zero_")
"""Operations that leave nothing of what their first operand held."""


@dataclass(frozen=True)
class CarriedState:
    """The buffers through which a forward depends on those before it."""

    of_samples: tuple[str, ...] = ()
    """Name of each buffer that takes something of the batch, with the operation that writes it."""
    of_forwards: Mapping[str, str] = field(default_factory=dict)
    """Name of each buffer whose next value is known without the batch, with the operation that writes it, and all the
    operations that its next value takes."""

    def compared_with(self, other: CarriedState) -> CarriedState:
        """Return the state with those of samples whose next values are others for another number of samples."""
        grown = [key for key, operations in self.of_forwards.items() if other.of_forwards.get(key) != operations]
        kept = {key: operations for key, operations in self.of_forwards.items() if key not in grown}
        return CarriedState((*self.of_samples, *grown), kept)


def carried_state(flow: Dataflow, loss: fx.Node, names: Mapping[int, str], model: str) -> CarriedState:
    """Return the state that a captured forward carries; `names` has the buffers' names by the ids of their tensors.

    Raises `CaptureError` for a tensor of the model that is no buffer: no checkpoint has it.
    """
    reads: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node, tensor in flow.tensors.items():
        if not isinstance(tensor, nn.Parameter):
            # A tensor that is no buffer may have several names for the same memory.
            reads[id(tensor) if id(tensor) in names else memory_of(tensor) or id(tensor)].append(node)

    def sources(node: fx.Node) -> Iterable[fx.Node]:
        return () if node.op == "call_function" and op_name(node) in MADE_ANEW else node.all_input_nodes

    needed = ancestors([loss])
    of_samples, of_forwards = list[str](), dict[str, str]()
    for identity, nodes in reads.items():
        writers = sorted((w for node in nodes for w in flow.writers.get(node, ())), key=flow.order.__getitem__)
        users = [(user, node) for node in nodes for user in node.users if user in needed]
        if writers and any(_reads(user, [node]) for user, node in users) and _reaches(flow, loss, nodes, writers):
            if identity not in names:
                raise line_of_node(writers[-1]).error(
                    model,
                    f"writes to the tensor {nodes[0].target}{line_of_node(writers[-1]).where}, which is no buffer, and "
                    "the next forward computes with it: no checkpoint would hold it. Register it: "
                    "self.register_buffer('state', tensor).",
                )
            name = names[identity]
            # What is written comes from samples if fields of the batch or random numbers lie before it.
            taken = sorted(reachable(writers, sources), key=flow.order.__getitem__)
            said = f"the buffer {name}, written by {described(writers[-1])}"
            if any(node.op == "placeholder" or is_random(node) for node in taken):
                of_samples.append(said)
            else:
                of_forwards[said] = _text(taken)
    return CarriedState(tuple(of_samples), of_forwards)


def _text(nodes: Sequence[fx.Node]) -> str:
    """Return operations with their numbers and their wiring, in which nodes go by their positions."""
    position = {node: at for at, node in enumerate(nodes)}
    given = (fx.node.map_arg((node.args, node.kwargs), position.get) for node in nodes)
    return " ".join(f"{node.target}{each}" for node, each in zip(nodes, given, strict=True))


def _reaches(flow: Dataflow, loss: fx.Node, reads: list[fx.Node], writers: list[fx.Node]) -> bool:
    """Return True if the loss depends on what a buffer held before this forward."""
    old, holders = set(reads), set(reads)  # nodes whose values depend on it, and owners of memory that hold it
    for node in flow.order:
        if node.op != "call_function" or op_name(node) in MADE_ANEW:
            continue
        sources = [source for source in node.all_input_nodes if source in old or storage_of(source) in holders]
        is_whole = node in writers and op_name(node) in _OVERWRITES and shape_of(node.args[0]) == shape_of(reads[0])
        if is_whole and not any(source in old and source is not node.args[0] for source in sources):
            holders -= set(reads)
            old -= set(reads)
        elif _reads(node, sources):
            old.add(node)
            holders |= {storage_of(written) for written in mutated_arguments(node)}
    return loss in old


def _reads(node: fx.Node, sources: list[fx.Node]) -> bool:
    """Return True if an operation computes with one of its operands, and does not only update it."""
    if (call := call_of(node)) is not None:
        given = pytree.tree_leaves(node.args[1])
        unread = {given[at] for at in set(call.written) - set(call.read_again)}
        return any(source not in unread for source in sources)
    if op_name(node) in ("batch_norm", "instance_norm") and mutated_arguments(node):
        return any(source not in node.args[3:5] for source in sources)
    return bool(sources)


# Gradients, and the values that blocks send.


def _with_gradients(exported: Exported, flow: Dataflow, names: Mapping[int, str]) -> tuple[list[fx.Node], set[str]]:
    """Return the trained parameters, and the names of the nodes on the way of a gradient from the loss to them.

    In-place writes pass it on, too: a node that shares memory with a written one counts as computed from it.
    """

    def sources(node: fx.Node) -> Iterator[fx.Node]:
        return filter(passes_gradient, (*node.all_input_nodes, *flow.writers.get(storage_of(node), ())))

    passed = reachable(filter(passes_gradient, [exported.loss]), sources)
    trained = [node for node, tensor in flow.tensors.items() if names.get(id(tensor)) in exported.trained]
    sharing: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in passed:
        sharing[storage_of(node)].append(node)

    def results(node: fx.Node) -> Iterator[fx.Node]:
        owner = storage_of(node)
        return filter(passed.__contains__, (*node.users, *(sharing[owner] if flow.writers.get(owner) else ())))

    return trained, {node.name for node in reachable(trained, results)}


def _sent_value(node: fx.Node, name: str) -> TensorSpec:
    """Return the spec of a value that later blocks read; raise `CaptureError` unless its size is fixed.

    Stages exchange tensors whose sizes are known before their values are.
    """
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
        return spec_of(node.name, value)
    # The module around the operation and all its readers, the innermost last, may run as written instead.
    readers = [each for each in (node, *node.users) if each.op == "call_function"]
    stacks = [[path for path, _ in (each.meta.get("nn_module_stack") or {}).values()] for each in readers]
    line = line_of_node(node)
    what = "the size of a tensor" if isinstance(value, torch.Tensor) else "a Python number"
    raise line.error(
        name,
        f"makes {what} depend on the values of a tensor in one layer{line.where} and uses it in another. Replace a "
        f"selection by a mask, and keep a number (.item()) a tensor.",
        inside=[path for path in stacks[0] if all(path in stack for stack in stacks)],
        reason=SIZES,
    )
