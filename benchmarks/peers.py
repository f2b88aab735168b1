"""Training steps of BERT as a good engineer would write them by hand: what our plans are measured against.

Plain PyTorch and Hugging Face, nothing of the workbench: `DistributedDataParallel`, FSDP2 (with and without full
recomputation of the layers) and `torch.distributed.pipelining` with stages cut by hand. All of them: every layer
compiled in place (or the model whole, for `torch.compile` to record as CUDA graphs), bf16 autocast (or FSDP2's own
bf16), fused AdamW, gradients clipped by their global norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Batch = Mapping[str, torch.Tensor]
CLIP_NORM = 1.0


class Peer:
    """`step(batch)` trains once on this replica's part of the global batch and returns its mean loss, on the device.

    `kind` is `ddp`, `ddp+graphs` (the model compiled whole, mode "reduce-overhead"), `fsdp` (reshard after backward
    only), `fsdp3` (after each forward too), `fsdp3+recompute`, or, as `pp4` and `pp2dp2`, a pipeline of so many stages
    and replicas.
    """

    def __new__(cls, kind: str, *_: Any, **__: Any) -> Peer:
        return super().__new__(_Pipelined if kind.startswith("pp") else _DataParallel)

    data: int
    """Data-parallel degree: the replica's samples are `global_batch / data`."""
    replica: int

    def step(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError


def pipeline_degrees(kind: str) -> tuple[int, int]:
    """Stages and replicas of `pp4` or `pp2dp2`."""
    stages, _, replicas = kind.removeprefix("pp").partition("dp")
    return int(stages), int(replicas or 1)


class _DataParallel(Peer):
    def __init__(self, kind: str, build: Callable[[], nn.Module], micro_batch: int, device: torch.device) -> None:
        self.micro_batch, self.device = micro_batch, device
        self.data, self.replica = dist.get_world_size(), dist.get_rank()
        model = _built(build, device)
        layers = model.bert.encoder.layer
        if kind.endswith("+recompute"):
            for index, layer in enumerate(layers):
                layers[index] = checkpoint_wrapper(layer)
        self.graphs = kind.endswith("+graphs") and device.type == "cuda"
        if self.graphs:
            model.compile(mode="reduce-overhead")
        else:
            _compile(layers, device)
        self.sharded = kind.startswith("fsdp")
        if self.sharded:
            policy = _policy(device)
            for layer in layers:
                fully_shard(layer, mp_policy=policy, reshard_after_forward=kind.startswith("fsdp3"))
            fully_shard(model, mp_policy=policy, reshard_after_forward=False)
            self.model: Any = model
        else:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = _adamw(model, device)

    def step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        parts = list(_micro_batches(batch, self.micro_batch))
        total = torch.zeros((), device=self.device)
        for index, part in enumerate(parts):
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with self._synchronised(index == len(parts) - 1):
                # FSDP2 casts the weights itself; autocast keeps softmax and losses in fp32 either way.
                with _autocast(self.device):
                    loss = self.model(**part).loss / len(parts)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return total

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        if self.sharded or last:
            yield
        else:
            with self.model.no_sync():
                yield


class _Pipelined(Peer):
    def __init__(self, kind: str, build: Callable[[], nn.Module], micro_batch: int, device: torch.device) -> None:
        self.micro_batch, self.device = micro_batch, device
        self.stages, self.data = pipeline_degrees(kind)
        self.mesh = init_device_mesh(device.type, (self.stages, self.data), mesh_dim_names=("pp", "dp"))
        self.rank, self.replica = self.mesh["pp"].get_local_rank(), self.mesh["dp"].get_local_rank()
        self.part = _Stage(_built(build, device), self.rank, self.stages)
        _compile(self.part.layers, device)
        self.tied = _tied_group(self.mesh) if self.stages > 1 else None
        self.optimizer = _adamw(self.part, device)
        self.schedule: Schedule1F1B | None = None

    def step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        schedule = self._scheduled(batch)
        losses: list[torch.Tensor] = []
        with _autocast(self.device):
            if self.rank == 0:
                schedule.step(batch["input_ids"], token_type_ids=batch["token_type_ids"])
            elif self.rank == self.stages - 1:
                schedule.step(
                    target=torch.cat([batch["labels"], batch["next_sentence_label"][:, None]], 1), losses=losses
                )
            else:
                schedule.step()
        self._reduce()
        self._clip()
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)

    def _scheduled(self, batch: Batch) -> Schedule1F1B:
        if self.schedule is None:
            count = len(batch["input_ids"]) // self.micro_batch
            group = self.mesh["pp"].get_group()
            stage = PipelineStage(self.part, self.rank, self.stages, self.device, group=group)
            self.schedule = Schedule1F1B(stage, count, loss_fn=_pretraining_loss)
        return self.schedule

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
    """Layers of a `BertForPreTraining`, shared out evenly, with the embeddings before the first and the head last."""

    def __init__(self, model: Any, rank: int, stages: int) -> None:
        super().__init__()
        layers = model.bert.encoder.layer
        bounds = [round(i * len(layers) / stages) for i in range(stages + 1)]
        self.layers = nn.ModuleList(layers[bounds[rank] : bounds[rank + 1]])
        self.embeddings = model.bert.embeddings if rank == 0 else None
        last = rank == stages - 1
        self.pooler = model.bert.pooler if last else None
        self.head = model.cls if last else None
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
        if self.head is None:
            return hidden
        return self.head(hidden, self.pooler(hidden))


def _pretraining_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    words, sentence = outputs
    labels, order = target[:, :-1], target[:, -1]
    return functional.cross_entropy(words.flatten(0, 1).float(), labels.flatten()) + functional.cross_entropy(
        sentence.float(), order
    )


def _tied_group(mesh: DeviceMesh) -> Any:
    ranks = mesh.mesh
    groups = {}
    for replica in range(ranks.shape[1]):
        members = (int(ranks[0, replica]), int(ranks[-1, replica]))
        groups[members] = dist.new_group(list(members))
    return next((group for members, group in groups.items() if dist.get_rank() in members), None)


def _built(build: Callable[[], nn.Module], device: torch.device) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return build().train()


def _compile(layers: Any, device: torch.device) -> None:
    if device.type == "cuda":
        for layer in layers:
            layer.compile()


def _policy(device: torch.device) -> MixedPrecisionPolicy:
    if device.type != "cuda":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _adamw(model: nn.Module, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")


def _micro_batches(batch: Batch, size: int) -> Iterator[dict[str, torch.Tensor]]:
    count = len(next(iter(batch.values()))) // size
    for index in range(count):
        yield {name: value[index * size : (index + 1) * size] for name, value in batch.items()}
