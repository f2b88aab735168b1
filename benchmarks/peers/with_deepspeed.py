"""DeepSpeed as its users tune it, around the same BERT, GPT-2 and OPT as the hand-written peers.

`deepspeed1`, `deepspeed2` and `deepspeed3` name the ZeRO stage. All of them: bf16 weights with fp32 master weights on
GPUs, PyTorch's fused AdamW, clipping by the global norm, collectives that overlap the backward pass, and buckets of
DeepSpeed's own size. What else is known to help has a name in `OPTIONS`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from peers import plain
from torch import nn

OPTIONS = {
    "compiled": "Every layer is compiled in place, as those of the hand-written peers.",
    "labelled-head": plain.OPTIONS["labelled-head"],
    "offload": "The optimiser's state lies in host memory, where DeepSpeed's own Adam steps; stages 2 and 3 only.",
    "recompute": plain.OPTIONS["recompute"],
    "recompute-half": plain.OPTIONS["recompute-half"],
}
CHECKPOINTING = plain.CHECKPOINTING
ENVIRONMENT: Mapping[str, str] = {"DS_ACCELERATOR": "cuda" if torch.cuda.is_available() else "cpu"}
STRONG = ("compiled", "labelled-head")
BASES = ("deepspeed1", "deepspeed2", "deepspeed3")


def parsed(kind: str) -> tuple[str, frozenset[str]]:
    """Split `deepspeed3+compiled` into its base and its options.

    Raises:
        ValueError: no peer is called so, or DeepSpeed is not installed.
    """
    base, *options = kind.split("+")
    if base not in BASES:
        raise ValueError(f"{base!r} is no peer of DeepSpeed. Write {', '.join(BASES)}.")
    for option in options:
        if option not in OPTIONS or (option == "offload" and base == "deepspeed1"):
            raise ValueError(f"{base} has no option {option!r}. Its options are {', '.join(sorted(OPTIONS))}.")
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            f"{base} needs DeepSpeed, which is not installed. Run pip install -r benchmarks/peers/requirements.txt."
        )
    return base, frozenset(options)


def strongest(base: str) -> str:
    """Return `base` with every option of `STRONG`."""
    return "+".join([base, *(option for option in STRONG if option not in base.split("+"))])


def fits(_kind: str, _world: int) -> bool:
    """Return whether a peer runs on so many devices: each of these does."""
    return True


def replicas(_kind: str, world: int) -> int:
    """Return the data-parallel degree on so many devices."""
    return world


class Peer(plain.Peer):
    """An engine of DeepSpeed that accumulates a replica's micro-batches and steps once."""

    def __new__(cls, *_: Any, **__: Any) -> Peer:
        return object.__new__(cls)

    def __init__(self, kind: str, build: Callable[[], nn.Module], micro_batch: int, device: torch.device) -> None:
        base, options = parsed(kind)
        self.micro_batch, self.device = micro_batch, device
        self.data, self.replica, self.tokens = dist.get_world_size(), dist.get_rank(), 0
        _forget_groups()
        import deepspeed

        deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)  # or C++ is compiled, on CPUs, for a minute
        deepspeed.init_distributed(dist.get_backend(), verbose=False)
        model, self.labelled = plain.prepared(build, options, "compiled" in options, device)
        offload = "offload" in options
        config = _config(int(base.removeprefix("deepspeed")), micro_batch, device, offload)
        optimizer = _host_adam(model) if offload else plain.adamw(model, device)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, batch: plain.Batch) -> torch.Tensor:
        parts = list(plain.micro_batches(batch, self.micro_batch))
        if self.engine.gradient_accumulation_steps() != len(parts):
            self.engine.set_train_batch_size(self.micro_batch * len(parts) * self.data)
        if self.labelled is not None:
            self.labelled.capacity = plain.capacity(parts)
        total, self.tokens = torch.zeros((), device=self.device), 0
        for part in parts:
            output = self.engine(**part)
            loss = output if self.labelled is not None else output.loss
            self.engine.backward(loss)  # divides by the number of micro-batches
            self.engine.step()  # does something after the last of them only
            total += loss.detach() / len(parts)
            self.tokens += part["input_ids"].numel()
        return total


def _config(stage: int, micro_batch: int, device: torch.device, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": plain.CLIP_NORM,
        "bf16": {"enabled": device.type == "cuda"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": sys.maxsize,
    }


def _host_adam(model: nn.Module) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiles its C++ when it is first built

    return DeepSpeedCPUAdam(model.parameters(), lr=plain.LEARNING_RATE, adamw_mode=True)


def _forget_groups() -> None:
    """Forget the process groups of an earlier engine in this process, which were destroyed with the default group.

    Written for DeepSpeed 0.19.8, which keeps them in variables of its modules.
    """
    with contextlib.suppress(ImportError):
        from deepspeed.comm import comm
        from deepspeed.utils import groups

        comm.cdb = None
        for name, value in vars(groups).items():
            if isinstance(value, dist.ProcessGroup):
                setattr(groups, name, None)
