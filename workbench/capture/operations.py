"""Questions about the operations of an exported graph: arguments, shapes, random numbers, mutations and aliasing.

First those about one operation, then those about a graph as a whole (`Dataflow`), then the context managers around
operations. The modules of this room and those of `workbench.execution` that rewrite blocks share them.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from workbench.capture.torch_internals import OpOverload, enter_autocast, exit_autocast, set_grad_enabled

aten = torch.ops.aten
T = TypeVar("T")
ATTENTION = aten.scaled_dot_product_attention.default
DROPOUT = aten.dropout.default
EMBEDDING = aten.embedding.default
LOGS = "workbench_logs"
"""Key in `fx.Node.meta` of operations that only logged scalars need; tensor parallelism gives them whole values."""
GROUPED_MATMUL = "workbench::grouped_mm"
"""Name of the operation that `workbench.capture.export.rewrites` registers."""


def scalar_tensor(value: torch.Tensor | float) -> torch.Tensor:
    """Return a scalar that was logged as a tensor without dims."""
    return value if isinstance(value, torch.Tensor) else torch.full((), value)


def names(text: str) -> frozenset[str]:
    """Return the words of a text, which names operations."""
    return frozenset(text.split())


TABLES = names("embedding embedding_bag _embedding_bag")
"""Names of the operations that look rows up in their first argument."""


def overloads(text: str) -> frozenset[Any]:
    """Return the operations of ATen that a text names: `add.Tensor`, or `view` for `view.default`."""
    pairs = (word.partition(".") for word in text.split())
    return frozenset(getattr(getattr(aten, name), overload or "default") for name, _, overload in pairs)


_HOST_READS = (
    *("ctc_loss", "histc", "multinomial", "lstm", "gru", "rnn_", "grouped_mm"),
    *("linalg_", "cholesky", "logdet", "slogdet", "inverse", "lstsq", "triangular_solve", "svd"),
)
"""Parts of the names of operations that a CUDA graph cannot stand for: their host code may read lengths, check whether
a factorisation failed, or keep random state of its own (cuDNN's recurrent layers)."""
_NO_HOST_READS = tuple(f"linalg_{name}" for name in ("vector_norm", "norm", "matmul", "vecdot", "cross", "diagonal"))
"""Operations that a CUDA graph can stand for although a part of their name is in `_HOST_READS`."""
_DROPOUT_RATES = ("p", "dropout", "dropout_p")
"""Argument names under which operations take a dropout rate."""
_UPDATES_STATISTICS = ("batch_norm", "instance_norm")
"""Operations that write to their running statistics although their schemas do not declare it."""
_MAYBE_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("reshape", "contiguous", "to", "type_as", "sum_to_size", "conj_physical", "unsafe_chunk", "unsafe_split"),
        *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid", "cartesian_prod"),
    )
)
"""Operations whose result is a view of the first argument or a copy, depending on the arguments, which no schema says.

Of a list of tensors, each result belongs to the tensor at its place."""


def schema_of(node: fx.Node) -> Any:
    """Return the schema of a call of a torch operation, None for every other node."""
    return node.target._schema if node.op == "call_function" and isinstance(node.target, OpOverload) else None


def op_name(node: fx.Node) -> str:
    """Return an operation's name without its overload: `add` for `aten.add.Tensor`, `space::name` for other spaces."""
    schema = schema_of(node)
    return str(getattr(node.target, "__name__", node.target) if schema is None else schema.name).removeprefix("aten::")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a torch operation by name, in the schema's order, with defaults filled in."""
    defaults = {argument.name: argument.default_value for argument in schema_of(node).arguments}
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


class UnknownSize(str):
    """A size that depends on values, by the name that export gave it; torch's own raises where it is compared."""

    def __mul__(self, other: Any) -> UnknownSize:
        return UnknownSize(f"{self}*{other}")

    __rmul__ = __mul__


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's tensor; `()` for everything else. A size that depends on values is no `int`."""
    return sizes_of(node.meta.get("val")) if isinstance(node, fx.Node) else ()


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor of an exported graph, as `shape_of`."""
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return tuple(size if isinstance(size, int) else UnknownSize(size) for size in sizes)


def dtype_of(node: Any) -> torch.dtype | None:
    """Return the dtype of a node's tensor, None for everything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def holds_integers(node: fx.Node) -> bool:
    """Return True if the node's tensor has an integer or boolean dtype, so that it carries no gradient."""
    dtype = dtype_of(node)
    return dtype is not None and not (dtype.is_floating_point or dtype.is_complex)


_TRANSPOSES = names("transpose swapaxes t mT matrix_H adjoint")
MOVED = _TRANSPOSES | names(
    "expand expand_as permute numpy_T unsqueeze select unbind softmax _softmax log_softmax _log_softmax cumsum"
)
"""Names of the operations that `moved_dim` knows: those that only move dims, or work along one."""


def moved_dim(node: fx.Node, dim: int) -> int | None:
    """Return the dim of the result that `dim` of the first argument becomes; None if the operation works along it."""
    given, name = arguments_of(node), op_name(node).rstrip("_")
    rank, result_rank = len(shape_of(node.args[0])), len(shape_of(node))
    if name in ("expand", "expand_as"):
        return dim + result_rank - rank
    if name == "permute":
        return [int(each % rank) for each in given["dims"]].index(dim)
    if name == "numpy_T":
        return rank - 1 - dim
    if name in _TRANSPOSES:
        pair: Any = node.args[1:3] if len(node.args) > 2 else (-2, -1)
        first, second = (each % rank for each in pair)
        return int({first: second, second: first}.get(dim, dim))
    if name == "unsqueeze":
        return dim + int(given["dim"] % result_rank <= dim)
    along = int(given.get("dim", 0) % rank)
    return None if along == dim else dim - (along < dim) if name in ("select", "unbind") else dim


def tensor_at(module: nn.Module, target: str) -> Any:
    """Return what a `get_attr` node with this dotted target reads from `module`."""
    return operator.attrgetter(target)(module)


def reachable(start: Iterable[T], neighbours: Callable[[T], Iterable[T]]) -> set[T]:
    """Return `start` and every node that can be reached from it by following `neighbours`."""
    seen: set[T] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(neighbours(node))
    return seen


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `nodes` and everything that they are computed from."""
    return reachable(nodes, lambda node: node.all_input_nodes)


def descendants(node: fx.Node) -> set[fx.Node]:
    """Return everything that is computed from `node`, which is not included."""
    return reachable(node.users, lambda user: user.users)


def copy_nodes(graph: fx.Graph, nodes: Iterable[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Copy `nodes`, in order, to the end of `graph`; `copies` maps originals to copies and is extended."""
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)


def replace_call(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
    """Replace a node by a call of `target` that has the same metadata."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args, dict(kwargs or {}))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def retarget(code: fx.GraphModule, device: torch.device) -> None:
    """Replace the device of factory calls and casts, which capture fixed to the model's device, by `device`."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in code.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    code.recompile()


def drop_nothing(code: fx.GraphModule) -> None:
    """Set the rate of every dropout to 0, that of attention and recurrent layers too."""
    for node in code.graph.nodes:
        if not is_random(node):
            continue
        for index, formal in enumerate(node.target._schema.arguments):
            if formal.name.startswith("dropout") or (formal.name == "p" and "dropout" in op_name(node)):
                if index < len(node.args):
                    node.update_arg(index, 0.0)
                else:
                    node.update_kwarg(formal.name, 0.0)
    code.recompile()


def use_float64(code: fx.GraphModule) -> None:
    """Let casts and factory calls, which capture fixed to a type, make float64 of every floating-point type."""

    def widened(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    for module in code.modules():  # the code of nested regions, such as a loop, is a module of its own
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, widened)
                node.kwargs = fx.node.map_aggregate(node.kwargs, widened)
            module.recompile()
    code.double()


def is_random(node: fx.Node) -> bool:
    """Return True if the node draws random numbers (attention, recurrent layers and dropouts: at a rate above 0)."""
    if schema_of(node) is None or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    given = arguments_of(node)
    rates = [given[name] for name in _DROPOUT_RATES if name in given]
    return all(rates) and given.get("train") is not False and given.get("training") is not False


def with_mean_slope(name: str, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Return what a random leaky ReLU computes whose slopes are all the mean of the range that they are drawn from.

    None for another operation, and for one in evaluation. `name` and `args` are those of a call of
    `aten::rrelu_with_noise`, whose second argument takes the slopes, by which its backward multiplies.
    """
    if name not in ("rrelu_with_noise", "rrelu_with_noise_") or len(args) < 5 or not args[4]:
        return None
    value, slopes, lower, upper = args[:4]
    slopes.copy_(torch.where(value > 0, 1.0, (lower + upper) / 2))
    return torch.mul(value, slopes, out=value if name.endswith("_") else None)


def draws_again(code: fx.GraphModule, recompute: str) -> bool:
    """Return True if a backward pass with this activation checkpointing draws random numbers a second time.

    Selective checkpointing stores the results of attention; dropout does not count, since compiled code recomputes its
    masks from the seed.
    """
    exempt = (DROPOUT, ATTENTION) if recompute == "selective" else (DROPOUT,)
    return recompute != "none" and any(node.target not in exempt for node in code.graph.nodes if is_random(node))


def is_replayable(code: fx.GraphModule, recompute: str) -> bool:
    """Return True if a block launches the same kernels in every step, so that a CUDA graph can stand for it.

    Some operations read values back to the host to decide what to launch: those of torch that are known to are listed
    in this module, and operations that other libraries registered are assumed to. A CUDA graph only captures random
    numbers of a seeded generator, so a block that draws numbers again in its recomputation is not replayable either.
    An operation that is missing from the list ends the run when the graph is captured.
    """
    if draws_again(code, recompute):
        return False
    for node in code.graph.nodes:
        if (schema := schema_of(node)) is None:
            continue
        space, name = schema.name.split("::")
        if space == "aten" and name in ("index", "index_put", "index_put_"):  # a mask is counted on the host
            if any(dtype_of(index) in (torch.bool, torch.uint8) for index in pytree.tree_leaves(node.args[1])):
                return False
            continue
        tags, is_listed = node.target.tags, any(word in name for word in _HOST_READS) and name not in _NO_HOST_READS
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            return False
        if is_listed or space not in ("aten", "prims"):
            return False
    return True


def mutated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments that the node writes to in place."""
    schema = schema_of(node)
    if schema is None:
        return ()
    if any(word in schema.name for word in _UPDATES_STATISTICS) and schema.name != "aten::_batch_norm_no_update":
        is_training = len(node.args) > 5 and bool(node.args[5])
        return tuple(arg for arg in node.args[3:5] if isinstance(arg, fx.Node) and is_training)
    if not schema.is_mutable:
        return ()
    given = arguments_of(node)
    written = [given[formal.name] for formal in schema.arguments if _is_written(formal)]
    return tuple(leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, fx.Node))


def mutates_buffers(code: fx.GraphModule) -> bool:
    """Return True if a block's code writes to a tensor that it is given: a second run would change it again."""
    nodes = code.graph.nodes
    return any(storage_of(written).op == "placeholder" for node in nodes for written in mutated_arguments(node))


def _is_written(formal: Any) -> bool:
    """Return True if an argument or a result of a schema is declared as written in place."""
    return formal.alias_info is not None and bool(formal.alias_info.is_write)


def storage_of(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory which `node` may be a view of (conservative: follows first arguments)."""
    source: Any = node
    while isinstance(source, fx.Node):
        node, schema = source, schema_of(source)
        if node.target is operator.getitem:
            source = node.args[0]
            made = schema_of(source)
            if made is not None and made.name in _MAYBE_VIEWS and isinstance(source.args[0], (list, tuple)):
                at: Any = node.args[1]
                source = source.args[0][at]
        elif schema is None:
            break
        elif any(_is_written(result) for result in schema.returns):
            source = next(iter(mutated_arguments(node)), None)
        elif schema.name == "aten::einsum":
            source = _permuted(*node.args[:2])
        else:
            is_alias = any(result.alias_info is not None for result in schema.returns)
            source = node.args[0] if node.args and (is_alias or schema.name in _MAYBE_VIEWS) else None
            if isinstance(source, (list, tuple)):
                source = source[0] if len(source) == 1 else None
    return node


def _permuted(equation: Any, operands: Any) -> Any:
    """Return the only operand of an `einsum` that keeps all of its dims, and so returns a view; None for others."""
    given, arrow, kept = equation.partition("->")
    is_view = set(given) <= set(kept) if arrow else len(set(given)) == len(given)
    return operands[0] if len(operands) == 1 and is_view else None


# Facts about a whole exported graph: what can be recomputed anywhere, what is needed, what is written in place.


@dataclass(frozen=True)
class Dataflow:
    """Facts about one exported graph that cutting it into blocks needs."""

    order: Mapping[fx.Node, int]
    """Position of every node."""
    tensors: Mapping[fx.Node, torch.Tensor]
    """Parameter, buffer or constant that each `get_attr` node reads."""
    recomputable: frozenset[fx.Node]
    """Nodes that depend on the batch and on constants only and draw no random numbers: every block may compute them."""
    views: frozenset[fx.Node]
    """Views of parameters that depend on nothing else that is computed: every block that reads one makes it again."""
    aliases: frozenset[fx.Node]
    """All nodes whose result shares memory with a parameter, which sharding frees when a block has run."""
    live: frozenset[fx.Node]
    """Nodes that the loss, another output or a mutation needs."""
    writers: Mapping[fx.Node, tuple[fx.Node, ...]]
    """Storage owner -> nodes that write to it, in order."""

    def identity(self, owner: fx.Node) -> int:
        """Return a number that is equal for two reads of one buffer or parameter."""
        return id(self.tensors.get(owner, owner))

    def recomputable_sources(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the recomputable nodes, views and attributes that `nodes` need, and the in-place writes to these."""

        def sources(node: fx.Node) -> Iterator[fx.Node]:
            for source in node.all_input_nodes:
                if source in self.recomputable or source in self.views or source.op == "get_attr":
                    yield source
                    yield from (w for w in self.writers.get(storage_of(source), ()) if w in self.recomputable)

        return reachable((source for node in nodes for source in sources(node)), sources)


def analyse_dataflow(module: fx.GraphModule, loss: fx.Node, outputs: Iterable[fx.Node] = ()) -> Dataflow:
    """Return the facts about an exported graph whose loss and other outputs are computed by the given nodes."""
    nodes = list(module.graph.nodes)
    writers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for written in mutated_arguments(node):
            writers[storage_of(written)].append(node)
    tensors = {
        node: value
        for node in nodes
        if node.op == "get_attr" and isinstance(value := tensor_at(module, str(node.target)), torch.Tensor)
    }
    # A storage that a node writes to which is not recomputable belongs to one place, and so does all that reads it.
    # What is left out for that may leave further writers behind, so the search is repeated until nothing changes.
    excluded: set[fx.Node] = set()
    written_tensors = {id(tensors[owner]) for owner in writers if owner in tensors}
    while True:
        recomputable: set[fx.Node] = set()
        for node in nodes:
            if storage_of(node) in excluded:
                continue
            if node in tensors:
                is_fixed = not isinstance(tensors[node], nn.Parameter) and id(tensors[node]) not in written_tensors
            elif node.op == "call_function":
                is_fixed = all(source in recomputable for source in node.all_input_nodes) and not is_random(node)
            else:
                is_fixed = node.op == "placeholder"
            if is_fixed:
                recomputable.add(node)
        bound = {o for o, by in writers.items() if o in recomputable and any(w not in recomputable for w in by)}
        if not bound:
            break
        excluded |= bound
    views, aliases = _parameter_views(nodes, tensors, writers, recomputable)
    return Dataflow(
        order={node: index for index, node in enumerate(nodes)},
        tensors=tensors,
        recomputable=frozenset(recomputable),
        views=frozenset(views),
        aliases=frozenset(aliases),
        live=frozenset(ancestors([loss, *outputs, *(node for node in nodes if mutated_arguments(node))])),
        writers={owner: tuple(nodes) for owner, nodes in writers.items()},
    )


def _parameter_views(
    nodes: list[fx.Node],
    tensors: Mapping[fx.Node, torch.Tensor],
    writers: Mapping[fx.Node, list[fx.Node]],
    recomputable: set[fx.Node],
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the `views` and `aliases` of `Dataflow`.

    The fake tensors of the export tell what shares memory, also for operations that do not declare it (`einsum`).
    """
    parameters = {s for node, tensor in tensors.items() if isinstance(tensor, nn.Parameter) for s in _storages(node)}
    written = {storage for owner in writers for storage in _storages(owner)}
    views: set[fx.Node] = set()
    aliases = {node for node in nodes if node.op == "call_function" and parameters & _storages(node)}
    for node in nodes:
        is_fixed = all(s in recomputable or s in tensors or s in views for s in node.all_input_nodes)
        if node in aliases and is_fixed and not is_random(node) and not written & _storages(node):
            views.add(node)
    return views, aliases


def _storages(node: fx.Node) -> set[StorageWeakRef]:
    """Return the memory of the fake tensors that a node returns."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    strided = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)
    return {StorageWeakRef(leaf.untyped_storage()) for leaf in strided}


# `torch.no_grad()` and `torch.autocast(…)` in a model's forward, inlined so that block boundaries can pass through.
#
# Export keeps the operations of each such `with` block in one higher-order operation, which hides what they draw, write
# and read. `inline_regions` moves them to the outer graph and marks each with the regions that it lies in;
# `restore_regions` enters and leaves the context managers again around the operations of one block.

_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SETTINGS: dict[Any, int] = {_GRAD: 1, _AUTOCAST: 4}
"""Higher-order operation -> number of its arguments that stand before the graph of the region."""


@dataclass(frozen=True)
class Region:
    """One `with` block: its higher-order operation and that operation's settings."""

    operation: Any
    settings: tuple[Any, ...]


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """Return the regions around an operation, outermost first."""
    regions: tuple[Region, ...] = node.meta.get("regions", ())
    return regions


def passes_gradient(node: fx.Node) -> bool:
    """Return True if an operation's result can carry a gradient to its inputs."""
    switches = [region.settings[0] for region in regions_of(node) if region.operation is _GRAD]
    is_detached = node.target is torch.ops.aten.detach.default
    return not holds_integers(node) and not is_detached and (not switches or bool(switches[-1]))


def inline_regions(module: fx.GraphModule) -> None:
    """Replace every region of `module` by its operations, in place."""
    while regions := [node for node in module.graph.nodes if node.target in _SETTINGS]:
        for node in regions:
            _inline(module, node)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")


def _inline(module: fx.GraphModule, region: fx.Node) -> None:
    number = _SETTINGS[region.target]
    body_name: Any = region.args[number]
    body = getattr(module, body_name.target)
    around = (*regions_of(region), Region(region.target, region.args[:number]))
    arguments = iter(region.args[number + 1 :])
    copies: dict[fx.Node, Any] = {}
    with module.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(arguments)
            elif node.op == "get_attr":  # the graph of a region inside this one
                name = next(name for i in itertools.count() if not hasattr(module, name := f"region_{i}"))
                module.add_module(name, getattr(body, str(node.target)))
                copies[node] = module.graph.get_attr(name)
            elif node.op == "output":
                results: Any = fx.node.map_arg(node.args[0], copies.__getitem__)
                for user in list(region.users):  # a region returns a tuple, and `getitem` takes the items out
                    user.replace_all_uses_with(results[user.args[1]])
                    region.graph.erase_node(user)
            else:
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
                copies[node].meta["regions"] = around
    module.graph.erase_node(region)


def restore_regions(graph: fx.Graph) -> None:
    """Enter and leave the context managers around the marked operations of a block's graph, in place."""
    entered: list[tuple[Region, fx.Node]] = []  # with the state that leaving the region restores
    for node in list(graph.nodes):
        if node.op not in ("call_function", "output"):
            continue
        wanted = regions_of(node)
        pairs = zip(entered, wanted, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        with graph.inserting_before(node):
            while len(entered) > common:
                region, state = entered.pop()
                leave = exit_autocast if region.operation is _AUTOCAST else set_grad_enabled
                graph.call_function(leave, (state,))
            for region in wanted[common:]:
                if region.operation is _AUTOCAST:
                    entered.append((region, graph.call_function(enter_autocast, region.settings)))
                else:
                    entered.append((region, graph.call_function(torch.is_grad_enabled)))
                    graph.call_function(set_grad_enabled, region.settings)
