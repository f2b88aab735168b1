"""Training steps of BERT, GPT-2 and OPT as a good engineer writes them by hand: what our plans are measured against.

Plain PyTorch and Hugging Face, nothing of the workbench: `DistributedDataParallel`, FSDP2 and
`torch.distributed.pipelining` with stages cut by hand. All of them: every layer compiled in place (or the model whole,
for `torch.compile` to record as CUDA graphs), bf16 autocast (or FSDP2's own bf16), fused AdamW, gradients clipped by
their global norm, and gradients of replicas reduced once a step by `no_sync` under DDP. What else is known to help has
a name in `OPTIONS`, so that the gain of each can be measured.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Batch = Mapping[str, torch.Tensor]
CLIP_NORM = 1.0
LEARNING_RATE = 1e-4
MUON_RATE, MOMENTUM, NEWTON_SCHULZ_STEPS = 1e-2, 0.95, 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Momentum, iterations and coefficients of `torch.optim.Muon`, by default."""
MATRICES_A_RANK = 8
"""Matrices of one shape that a rank orthogonalises in one batch, while earlier results return."""
IGNORED = -100
"""Label of a position that does not count."""
MASKED_SHARE = 0.15
"""Share of the positions that BERT masks (arXiv:1810.04805); a balanced split needs it before it sees a batch."""
BUCKET_ELEMENTS = (25 << 20) // 4
"""fp32 numbers of a bucket of gradients: 25 MiB, as DistributedDataParallel's."""
HEAD_GRAIN = 64
"""Parts of a micro-batch in which the labelled head's rows are counted. Data of which the number of labels varies then
change the compiled head's shape rarely, and at most 1/64 of the positions are computed in vain."""

OPTIONS = {
    "labelled-head": "The vocabulary head is compiled, with its loss, and computes labelled positions only.",
    "one-reduction": "FSDP2 reduces gradients once a step, and not after every micro-batch; where weights are not "
    "resharded after the forward pass, it also gathers them once a step.",
    "balanced": "The last stage of a pipeline has fewer layers, by the products of its vocabulary head.",
    "recompute": "Every layer is checkpointed.",
    "recompute-half": "Every second layer is checkpointed.",
    "graphs": "The model is compiled whole, in the mode that records CUDA graphs.",
    "sdpa": "Attention that the library spells out (the pre-LN BERT) calls PyTorch's fused kernel instead.",
    "muon": "Hidden matrices are trained by Muon: each is orthogonalised by one of the ranks (`DividedMuon`).",
    "masters": "Weights are bf16, copies of the fp32 weights that the optimiser updates; gradients add up in fp32. "
    "Replicas average those in buckets, while the last backward pass runs, in the place of DistributedDataParallel.",
}
CHECKPOINTING = ("", "recompute-half", "recompute")
"""Options that a sweep tries, from the fastest to the leanest; the empty one checkpoints nothing."""
ENVIRONMENT: Mapping[str, str] = {}
"""Environment variables that the peers' processes need besides."""
_ALLOWED = {
    "loop": {"labelled-head", "recompute", "recompute-half", "graphs", "masters", "sdpa"},
    "ddp": {"labelled-head", "recompute", "recompute-half", "graphs", "masters", "muon", "sdpa"},
    "fsdp": {"labelled-head", "one-reduction", "recompute", "recompute-half", "muon", "sdpa"},
    "fsdp3": {"labelled-head", "one-reduction", "recompute", "recompute-half"},
    "pp": {"labelled-head", "balanced", "recompute", "recompute-half"},
}
STRONG = {
    "loop": ("labelled-head",),
    "ddp": ("labelled-head",),
    "fsdp": ("labelled-head", "one-reduction"),
    "fsdp3": ("labelled-head", "one-reduction"),
    "pp": ("labelled-head", "balanced"),
}
"""Options that make a peer as fast as we know how; micro-batch and checkpointing are found by a sweep."""


def parsed(kind: str) -> tuple[str, frozenset[str]]:
    """Split `fsdp+labelled-head` into its base and its options; raise `ValueError` for what no peer has."""
    base, *options = kind.split("+")
    if base.startswith("pp"):
        pipeline_degrees(base)
    allowed = _ALLOWED.get(_family(base))
    if allowed is None:
        raise ValueError(
            f"{base!r} is no hand-written peer. Write loop, ddp, fsdp, fsdp3, or a pipeline such as pp4 or pp2dp2."
        )
    for option in options:
        if option not in allowed:
            raise ValueError(f"{base} has no option {option!r}. Its options are {', '.join(sorted(allowed))}.")
    if {"recompute", "recompute-half"} <= set(options):
        raise ValueError(f"{kind} checkpoints every layer and every second layer. Keep one of the two options.")
    return base, frozenset(options)


def strongest(base: str) -> str:
    """Return `base` with every option of `STRONG`."""
    return "+".join([base, *(option for option in STRONG[_family(base)] if option not in base.split("+"))])


def pipeline_degrees(base: str) -> tuple[int, int]:
    """Return the stages and replicas of `pp4` or `pp2dp2`; raise `ValueError` for another text."""
    stages, _, replicas = base.partition("+")[0].removeprefix("pp").partition("dp")
    if not stages.isdigit() or int(stages) < 2 or (replicas and not replicas.isdigit()):
        raise ValueError(f"{base!r} is no pipeline. Write the stages, and replicas if any: pp4 or pp2dp2.")
    return int(stages), int(replicas or 1)


def fits(kind: str, world: int) -> bool:
    """Return whether a peer runs on so many devices."""
    if not kind.startswith("pp"):
        return world == 1 or _family(kind) != "loop"
    stages, data = pipeline_degrees(kind)
    return stages * data == world


def replicas(kind: str, world: int) -> int:
    """Return the data-parallel degree on so many devices."""
    return pipeline_degrees(kind)[1] if kind.startswith("pp") else world


def _family(base: str) -> str:
    base = base.partition("+")[0]
    return "pp" if base.startswith("pp") else base


class Peer:
    """`step(batch)` trains once on this replica's part of the global batch and returns its mean loss, on the device.

    `kind` is a base and options of `OPTIONS`, joined by `+`. The base is `loop` (one device, no wrapper), `ddp`, `fsdp`
    (reshard after the backward pass only), `fsdp3` (after each forward pass too), or, as `pp4` and `pp2dp2`, a pipeline
    of so many stages and replicas.
    """

    def __new__(cls, kind: str, *_: Any, **__: Any) -> Peer:
        return super().__new__(_Pipelined if kind.startswith("pp") else _DataParallel)

    data: int
    """Data-parallel degree: the replica's samples are `global_batch / data`."""
    replica: int
    tokens: int
    """Tokens that the replica trained on in the last step."""
    enter: Callable[[str], None] = staticmethod(lambda _phase: None)
    """Called with the name of each phase of a step when its first kernel is about to be launched."""

    def step(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError


class _DataParallel(Peer):
    def __init__(self, kind: str, build: Callable[[], nn.Module], micro_batch: int, device: torch.device) -> None:
        base, self.options = parsed(kind)
        self.micro_batch, self.device = micro_batch, device
        self.data, self.replica, self.tokens = dist.get_world_size(), dist.get_rank(), 0
        self.graphs = "graphs" in self.options and device.type == "cuda"
        model, self.labelled = prepared(build, self.options, not self.graphs, device)
        self.counted: Batch | None = None
        if self.graphs:
            model.compile(mode="reduce-overhead")
        self.sharded = base.startswith("fsdp")
        self.gathered_once = base == "fsdp"
        if self.sharded:
            policy = _policy(device)
            for layer in _layers(model):
                fully_shard(layer, mp_policy=policy, reshard_after_forward=base == "fsdp3")
            fully_shard(model, mp_policy=policy, reshard_after_forward=False)
        self.model: Any = model
        has_masters = "masters" in self.options
        if base == "ddp" and not has_masters:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.masters = (_Masters if base == "loop" else _AveragedMasters)(model, device) if has_masters else None
        self.trained: nn.Module = model if self.masters is None else self.masters.weights
        updated = list(self.trained.parameters())
        with_muon = "muon" in self.options
        self.optimizer: Any = DividedMuon(model, updated, device) if with_muon else adamw(self.trained, device)

    def step(self, batch: Batch) -> torch.Tensor:
        if not isinstance(self.masters, _AveragedMasters):  # whose gradients stay in their buckets
            self.optimizer.zero_grad(set_to_none=True)
        parts = list(micro_batches(batch, self.micro_batch))
        if self.labelled is not None and batch is not self.counted:
            self.labelled.capacity, self.counted = capacity(parts), batch
        total, self.tokens = torch.zeros((), device=self.device), 0
        for index, part in enumerate(parts):
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with self._synchronised(index == len(parts) - 1):
                # FSDP2 casts the weights itself; autocast keeps softmax and losses in fp32 either way.
                self.enter("forward")
                with _autocast(self.device):
                    output = self.model(**part)
                    loss = (output if self.labelled is not None else output.loss) / len(parts)
                self.enter("backward")
                if self.masters is not None:
                    self.masters.begin_backward(index == 0, index == len(parts) - 1)
                loss.backward()
            if self.masters is not None:
                self.masters.take_gradients()
            total += loss.detach()
            self.tokens += part["input_ids"].numel()
        self.enter("norm")
        nn.utils.clip_grad_norm_(self.trained.parameters(), CLIP_NORM)
        self.enter("update")
        self.optimizer.step()
        if self.masters is not None:
            self.masters.copy_weights()
        return total

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Reduce gradients after this micro-batch's backward pass only if it is the last, or if nothing says so."""
        if self.sharded and "one-reduction" in self.options:
            self.model.set_requires_gradient_sync(last)
            if self.gathered_once:
                self.model.set_reshard_after_backward(last)
            yield
        elif last or not isinstance(self.model, DistributedDataParallel):
            yield
        else:
            with self.model.no_sync():
                yield


class _Masters:
    """fp32 weights and gradients in the place of a model's, whose own become bf16 (on a CPU they stay fp32)."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.copies = list(model.parameters())
        self.weights = nn.ParameterList(copy.detach().clone() for copy in self.copies)
        model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    def begin_backward(self, first: bool, last: bool) -> None:
        """Say that a backward pass begins, and whether it is the first or the last one of a step."""

    def take_gradients(self) -> None:
        """Add the model's gradients to those of the fp32 weights, and free them."""
        pairs = [(w, copy.grad) for w, copy in zip(self.weights, self.copies, strict=True) if copy.grad is not None]
        new = [(weight, gradient) for weight, gradient in pairs if weight.grad is None]
        later = [(weight.grad, gradient) for weight, gradient in pairs if weight.grad is not None]
        for weight, _ in new:
            weight.grad = torch.empty_like(weight)
        if new:
            torch._foreach_copy_([weight.grad for weight, _ in new], [gradient for _, gradient in new])
        if later:
            torch._foreach_add_([total for total, _ in later], [gradient for _, gradient in later])
        for copy in self.copies:
            copy.grad = None

    @torch.no_grad()
    def copy_weights(self) -> None:
        torch._foreach_copy_(self.copies, list(self.weights))


class _AveragedMasters(_Masters):
    """Masters of several replicas, whose gradients lie in buckets as large as DistributedDataParallel's.

    A gradient is added to its bucket as soon as a backward pass has made it, and a bucket is averaged as soon as the
    last pass has filled it.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self.handles: list[Any] = []
        self.first = self.last = True
        pairs = [pair for pair in zip(self.copies, self.weights, strict=True) if pair[0].requires_grad]
        groups: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
        for pair in reversed(pairs):  # about the order in which a backward pass makes them
            if sum(weight.numel() for _, weight in groups[-1]) > BUCKET_ELEMENTS:
                groups.append([])
            groups[-1].append(pair)
        self.missing = [0] * len(groups)
        self.sizes = [len(group) for group in groups]
        self.buckets = [torch.zeros(sum(w.numel() for _, w in group), device=device) for group in groups]
        # A strong reference would make each copy hold itself through its hook, a cycle that Python cannot collect.
        add = weakref.WeakMethod(self._add)

        def on_gradient(weight: torch.Tensor, bucket: int, copy: torch.Tensor) -> None:
            method = add()
            assert method is not None
            method(weight, bucket, copy)

        for index, (group, bucket) in enumerate(zip(groups, self.buckets, strict=True)):
            parts = bucket.split([weight.numel() for _, weight in group])
            for (copy, weight), part in zip(group, parts, strict=True):
                weight.grad = part.view_as(weight)
                copy.register_post_accumulate_grad_hook(partial(on_gradient, weight, index))

    def begin_backward(self, first: bool, last: bool) -> None:
        self.first, self.last = first, last
        self.missing = list(self.sizes)

    def _add(self, weight: torch.Tensor, bucket: int, copy: torch.Tensor) -> None:
        (weight.grad.copy_ if self.first else weight.grad.add_)(copy.grad)  # type: ignore[union-attr]
        copy.grad = None
        self.missing[bucket] -= 1
        if self.last and not self.missing[bucket]:
            self.buckets[bucket].div_(dist.get_world_size())
            self.handles.append(dist.all_reduce(self.buckets[bucket], async_op=True))

    def take_gradients(self) -> None:
        """Wait for the averages, after the last backward pass of a step; raise `RuntimeError` if one is missing."""
        if self.last and len(self.handles) < len(self.buckets):
            raise RuntimeError("A parameter got no gradient, so that its bucket was not averaged.")
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


class _Pipelined(Peer):
    def __init__(self, kind: str, build: Callable[[], nn.Module], micro_batch: int, device: torch.device) -> None:
        base, self.options = parsed(kind)
        self.micro_batch, self.device = micro_batch, device
        self.stages, self.data = pipeline_degrees(base)
        self.mesh = init_device_mesh(device.type, (self.stages, self.data), mesh_dim_names=("pp", "dp"))
        self.rank, self.replica = self.mesh["pp"].get_local_rank(), self.mesh["dp"].get_local_rank()
        self.tokens = 0
        self.part = _Stage(built(build, device), self.rank, self.stages, self.options)
        _checkpoint(self.part.layers, self.options)
        words = self.part.words
        _compile([*self.part.layers, *([words] if words is not None else [])], device)
        self.tied = _tied_group(self.mesh)
        self.optimizer = adamw(self.part, device)
        self.schedule: Schedule1F1B | None = None
        self.capacity, self.counted = 0, None

    def step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        schedule = self._scheduled(batch)
        losses: list[torch.Tensor] = []
        if self.part.words is not None and batch is not self.counted:
            self.capacity, self.counted = capacity(list(micro_batches(batch, self.micro_batch))), batch
        with _autocast(self.device):
            if self.rank == 0:
                schedule.step(batch["input_ids"], token_type_ids=batch["token_type_ids"], return_outputs=False)
            elif self.rank == self.stages - 1:
                target = torch.cat([batch["labels"], batch["next_sentence_label"][:, None]], 1)
                schedule.step(target=target, losses=losses, return_outputs=False)
            else:
                schedule.step(return_outputs=False)
        self.tokens = batch["input_ids"].numel()
        self._reduce()
        self._clip()
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)

    def _scheduled(self, batch: Batch) -> Schedule1F1B:
        if self.schedule is None:
            count = len(batch["input_ids"]) // _divisor(batch, self.micro_batch)
            group = self.mesh["pp"].get_group()
            stage = PipelineStage(self.part, self.rank, self.stages, self.device, group=group)
            self.schedule = Schedule1F1B(stage, count, loss_fn=self._loss)
        return self.schedule

    def _loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        labels, order = target[:, :-1], target[:, -1]
        if self.part.words is not None:
            return self.part.labelled_loss(output, labels, order, self.capacity)
        words, sentence = output
        return functional.cross_entropy(words.flatten(0, 1).float(), labels.flatten()) + functional.cross_entropy(
            sentence.float(), order
        )

    def _reduce(self) -> None:
        """Mean over replicas; the tied embedding's gradient summed over the two stages that hold it."""
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        if self.data > 1:
            group = self.mesh["dp"].get_group()
            handles = [dist.all_reduce(g, group=group, async_op=True) for g in gradients]
            for handle in handles:
                handle.wait()
            torch._foreach_div_(gradients, self.data)
        if self.tied is not None and self.part.tied is not None:
            dist.all_reduce(self.part.tied.grad, group=self.tied)

    def _clip(self) -> None:
        counted = [p for p in self.part.parameters() if p.grad is not None]
        if self.rank > 0 and self.part.tied is not None:
            counted = [p for p in counted if p is not self.part.tied]
        norms = torch._foreach_norm([p.grad for p in counted])
        total = torch.stack(norms).square().sum()
        dist.all_reduce(total, group=self.mesh["pp"].get_group())
        scale = (CLIP_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([p.grad for p in self.part.parameters() if p.grad is not None], scale)


class _Stage(nn.Module):
    """Layers of a `BertForPreTraining`, with the embeddings before the first and the head behind the last.

    With `labelled-head` the last stage returns hidden states, from which `labelled_loss` computes the loss.
    """

    def __init__(self, model: Any, rank: int, stages: int, options: frozenset[str]) -> None:
        super().__init__()
        layers = model.bert.encoder.layer
        labelled = "labelled-head" in options
        head = head_in_layers(model, labelled) if "balanced" in options else 0.0
        bounds = balanced_bounds(len(layers), stages, head) if head else even_bounds(len(layers), stages)
        self.layers = nn.ModuleList(layers[bounds[rank] : bounds[rank + 1]])
        self.embeddings = model.bert.embeddings if rank == 0 else None
        last = rank == stages - 1
        self.pooler = model.bert.pooler if last else None
        self.head = model.cls if last else None
        self.words = _WordLoss(model.cls.predictions) if last and labelled else None
        self.tied = (
            model.bert.embeddings.word_embeddings.weight
            if rank == 0
            else model.cls.predictions.decoder.weight
            if last
            else None
        )

    def forward(self, hidden: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> Any:
        if self.embeddings is not None:
            hidden = self.embeddings(input_ids=hidden, token_type_ids=token_type_ids)
        for layer in self.layers:
            output = layer(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        if self.head is None or self.words is not None:
            return hidden
        return self.head(hidden, self.pooler(hidden))

    def labelled_loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, order: torch.Tensor, capacity: int
    ) -> torch.Tensor:
        sentence = self.head.seq_relationship(self.pooler(hidden))
        words = self.words(hidden, labels, labelled_places(labels, capacity))
        return words + functional.cross_entropy(sentence.float(), order)


class _LabelledPretraining(nn.Module):
    """A BERT with a vocabulary head that returns its loss and computes that head where a label stands only."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.bert, self.cls = model.bert, model.cls
        self.words = _WordLoss(model.cls.predictions)
        self.capacity = 0
        """Rows that the head computes; at least as many as any micro-batch has labels."""

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
    ) -> torch.Tensor:
        seen = self.bert(input_ids=input_ids, token_type_ids=token_type_ids)
        words = self.words(seen.last_hidden_state, labels, labelled_places(labels, self.capacity))
        if next_sentence_label is None:
            return words
        sentence = self.cls.seq_relationship(seen.pooler_output)
        return words + functional.cross_entropy(sentence.float(), next_sentence_label)


class _LabelledCausal(nn.Module):
    """A causal language model that returns its loss, whose head is compiled with the loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.base_model
        self.words = _WordLoss(model.lm_head)
        self.capacity = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.body(input_ids=input_ids).last_hidden_state
        following = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return self.words(hidden, following, labelled_places(following, self.capacity))


def _labelled(model: Any) -> _LabelledPretraining | _LabelledCausal:
    return _LabelledPretraining(model) if hasattr(model, "bert") else _LabelledCausal(model)


def _layers(model: Any) -> nn.ModuleList:
    """Return the layers of a Hugging Face BERT, GPT-2 or OPT, labelled or not; raise `ValueError` for another model."""
    for path in ("bert.encoder.layer", "transformer.h", "model.decoder.layers", "body.h", "body.decoder.layers"):
        with contextlib.suppress(AttributeError):
            return cast(nn.ModuleList, model.get_submodule(path))
    raise ValueError(f"The hand-written peers train BERT, GPT-2 and OPT, and not {type(model).__name__}.")


class _WordLoss(nn.Module):
    """Mean loss of the vocabulary head over the given positions; compiled as a whole."""

    def __init__(self, predictions: nn.Module) -> None:
        super().__init__()
        self.predictions = predictions

    def forward(self, hidden_BSH: torch.Tensor, labels_BS: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
        at = places_N.clamp(min=0)
        targets = labels_BS.flatten()[at].masked_fill(places_N < 0, IGNORED)
        logits = self.predictions(hidden_BSH.flatten(0, 1)[at])
        return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED)


def labelled_places(labels: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the flat positions of the labels, filled up with -1 to `capacity`; the host need not wait."""
    return torch.nonzero_static((labels != IGNORED).flatten(), size=capacity, fill_value=-1)[:, 0]


def capacity(parts: Sequence[Batch]) -> int:
    """Return the rows of the labelled head: the most labels of any micro-batch, rounded up by `HEAD_GRAIN`.

    The host waits for the device, once for each batch that it has not seen in the step before; a data loader would
    know the number.
    """
    most = int(torch.stack([(part["labels"] != IGNORED).sum() for part in parts]).max())
    grain = -(-parts[0]["labels"].numel() // HEAD_GRAIN)
    return max(1, -(-most // grain)) * grain


def even_bounds(layers: int, stages: int) -> list[int]:
    """Return where each stage begins, and the end, of stages with as many layers as each other."""
    return [round(i * layers / stages) for i in range(stages + 1)]


def balanced_bounds(layers: int, stages: int, head: float) -> list[int]:
    """Return where each stage begins, and the end, with the head counted as `head` layers of the last stage."""
    before = stages - 1

    def slowest(last: int) -> float:
        return max(-(-(layers - last) // before), last + head)

    last = min(range(1, layers - before + 1), key=lambda count: (slowest(count), -count))
    return [*(-(-i * (layers - last) // before) for i in range(stages)), layers]


def head_in_layers(model: Any, labelled: bool) -> float:
    """Return the products of the vocabulary head over those of one layer, by the sizes of their matrices."""

    def products(module: nn.Module) -> int:
        return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))

    share = MASKED_SHARE if labelled else 1.0
    return share * products(model.cls.predictions) / products(model.bert.encoder.layer[0])


def _checkpoint(layers: nn.ModuleList, options: Container[str]) -> None:
    every = 1 if "recompute" in options else 2 if "recompute-half" in options else 0
    for index in range(0, len(layers), every) if every else ():
        layers[index] = checkpoint_wrapper(layers[index])


def _tied_group(mesh: DeviceMesh) -> Any:
    ranks = mesh.mesh
    groups = {}
    for replica in range(ranks.shape[1]):
        members = (int(ranks[0, replica]), int(ranks[-1, replica]))
        groups[members] = dist.new_group(list(members))
    return next((group for members, group in groups.items() if dist.get_rank() in members), None)


def built(build: Callable[[], nn.Module], device: torch.device) -> Any:
    """Return the model on a device, in training mode, with the same initial weights on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        return build().train()


def prepared(
    build: Callable[[], nn.Module], options: Container[str], is_compiled: bool, device: torch.device
) -> tuple[Any, _LabelledPretraining | _LabelledCausal | None]:
    """Return a model with the checkpointing and the head of its options, and the labelled model if it is one.

    A compiled model has each layer compiled in place, and the head if it is labelled.
    """
    model = built(build, device)
    layers = _layers(model)
    if "sdpa" in options:
        _fuse_attention(model)
    _checkpoint(layers, options)
    labelled = _labelled(model) if "labelled-head" in options else None
    if is_compiled:
        _compile([*layers, *([labelled.words] if labelled else [])], device)
    return labelled or model, labelled


def _fuse_attention(model: nn.Module) -> None:
    """Let the attention of a `MegatronBert` call PyTorch's kernel; samples have no padding, so there is no mask."""
    from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertSelfAttention

    for module in model.modules():
        if isinstance(module, MegatronBertSelfAttention):
            module.forward = partial(_fused_attention, module)  # type: ignore[method-assign]


def _fused_attention(attention: Any, hidden_BSH: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    shape = (*hidden_BSH.shape[:2], attention.num_attention_heads, attention.attention_head_size)
    projections = (attention.query, attention.key, attention.value)
    q_BNSD, k_BNSD, v_BNSD = (each(hidden_BSH).view(shape).transpose(1, 2) for each in projections)
    dropout = attention.dropout.p if attention.training else 0.0
    mixed_BNSD = functional.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, dropout_p=dropout)
    return mixed_BNSD.transpose(1, 2).flatten(2), None


def _compile(modules: Sequence[nn.Module], device: torch.device) -> None:
    if device.type == "cuda":
        for module in modules:
            module.compile()


def _policy(device: torch.device) -> MixedPrecisionPolicy:
    if device.type != "cuda":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def adamw(model: nn.Module, device: torch.device) -> torch.optim.AdamW:
    """Return the optimiser of every peer; its update is one fused kernel on GPUs."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")


class DividedMuon:
    """Muon for the matrices of linear layers, and fused AdamW for all other parameters.

    The update of a matrix is that of `torch.optim.Muon`, in bf16. Each matrix is orthogonalised by one rank, in batches
    of its shape, while others travel. Under DDP, which leaves every gradient on every rank, the results are
    all-gathered (Keller Jordan's `MuonWithAuxAdam`); under FSDP2 an all-to-all brings the shards of a matrix to its
    rank and a second one takes the shards of the result back (microsoft/dion). Momentum is stored where it is read.
    `updated` are the model's parameters in their order, or what is updated in the place of each.
    """

    def __init__(self, model: nn.Module, updated: Sequence[nn.Parameter], device: torch.device) -> None:
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        linear = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
        hidden = {weight for weight in linear if id(weight) not in tables}
        pairs = list(zip(model.parameters(), updated, strict=True))
        matrices = [weight for parameter, weight in pairs if parameter in hidden]
        others = [weight for parameter, weight in pairs if parameter not in hidden]
        self.adamw = torch.optim.AdamW(others, lr=LEARNING_RATE, fused=device.type == "cuda")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            if isinstance(matrix, DTensor) and matrix.shape[0] % self.ranks:
                raise ValueError(f"The {matrix.shape[0]} rows of a matrix do not divide among {self.ranks} ranks.")
            shapes[matrix.shape].append(matrix)
        size = MATRICES_A_RANK * self.ranks
        self.chunks = [same[first : first + size] for same in shapes.values() for first in range(0, len(same), size)]
        self.momentum: dict[nn.Parameter, torch.Tensor] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adamw.zero_grad(set_to_none)
        for matrix in (matrix for chunk in self.chunks for matrix in chunk):
            matrix.grad = None

    @torch.no_grad()
    def step(self) -> None:
        arriving = [self._to_owners(chunk) for chunk in self.chunks]
        self.adamw.step()
        returning = [self._from_owners(chunk, coming()) for chunk, coming in zip(self.chunks, arriving, strict=True)]
        for chunk, coming in zip(self.chunks, returning, strict=True):
            rows, columns = chunk[0].shape
            rate = MUON_RATE * max(1.0, rows / columns) ** 0.5
            updates = coming()[: len(chunk)].unbind()
            torch._foreach_add_([_local(matrix) for matrix in chunk], [u.float() for u in updates], alpha=-rate)

    def _to_owners(self, chunk: Sequence[nn.Parameter]) -> Callable[[], torch.Tensor]:
        """Start to bring together the matrices of this rank, and return what waits for them: [matrices, rows, columns].

        A rank that has fewer than another gets zeros in place of the rest.
        """
        each = -(-len(chunk) // self.ranks)
        if not isinstance(chunk[0], DTensor):
            directions = self._directions(chunk[self.rank * each : (self.rank + 1) * each])
            own = chunk[0].new_zeros(each, *chunk[0].shape, dtype=torch.bfloat16)
            for index, direction in enumerate(directions):
                own[index] = direction
            return lambda: own
        rows, columns = chunk[0].shape[0] // self.ranks, chunk[0].shape[1]
        sent = _local(chunk[0]).new_zeros(self.ranks * each, rows, columns, dtype=torch.bfloat16)
        torch._foreach_copy_(list(sent[: len(chunk)].unbind()), self._directions(chunk))
        arrived = torch.empty_like(sent)
        work = dist.all_to_all_single(arrived, sent, async_op=True)

        def wait(_alive: torch.Tensor = sent) -> torch.Tensor:
            work.wait()
            return arrived.view(self.ranks, each, rows, columns).transpose(0, 1).reshape(each, -1, columns)

        return wait

    def _from_owners(self, chunk: Sequence[nn.Parameter], own: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Orthogonalise this rank's matrices, start to send them, and return what waits for this rank's of all."""
        found = _orthogonalised(own)
        each, rows, columns = found.shape
        if not isinstance(chunk[0], DTensor):
            arrived = found.new_empty(self.ranks * each, rows, columns)
            work = dist.all_gather_into_tensor(arrived, found, async_op=True)
        else:
            found = found.view(each, self.ranks, -1, columns).transpose(0, 1).contiguous()
            arrived = torch.empty_like(found)
            work = dist.all_to_all_single(arrived, found, async_op=True)

        def wait(_alive: torch.Tensor = found) -> torch.Tensor:
            work.wait()
            return arrived.view(self.ranks * each, -1, columns)

        return wait

    def _directions(self, matrices: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Return the gradients with momentum and Nesterov's look-ahead, of the shards that this rank has."""
        if not matrices:
            return []
        gradients = [_local(cast(torch.Tensor, matrix.grad)) for matrix in matrices]
        for matrix, gradient in zip(matrices, gradients, strict=True):
            if matrix not in self.momentum:
                self.momentum[matrix] = torch.zeros_like(gradient)
        momenta = [self.momentum[matrix] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        return list(torch._foreach_lerp(gradients, momenta, MOMENTUM))


def _orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Return what `torch.optim.Muon` makes of each matrix of a batch [matrices, rows, columns], in bf16."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT.contiguous() if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if is_tall else x


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _divisor(batch: Batch, size: int) -> int:
    """Return `size`; raise `ValueError` where it would leave samples of the batch over."""
    samples = len(batch["input_ids"])
    if samples % size:
        raise ValueError(f"{samples} samples of a replica do not divide into micro-batches of {size}.")
    return size


def micro_batches(batch: Batch, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a replica's batch in micro-batches; raise `ValueError` where samples would be left over."""
    for index in range(len(batch["input_ids"]) // _divisor(batch, size)):
        yield {name: value[index * size : (index + 1) * size] for name, value in batch.items()}
