"""Megatron-Core's own GPT and BERT, at the parallel degrees in their name, as its users tune them.

`megatron`, `megatron-tp2`, `megatron-pp4` and `megatron-tp2pp2` name the tensor- and pipeline-parallel degrees; what
devices are left are replicas. All of them: bf16 weights with fp32 gradients and master weights on GPUs, the distributed
optimiser, reductions and gathers that overlap the passes, sequence parallelism beside tensor parallelism, a vocabulary
padded to a multiple of 128 rows a device, and clipping by the global norm. What else helps has a name in `OPTIONS`.

Megatron-Core's BERT has its LayerNorms before attention and MLP, unlike the published one; its products are the same.
Without a GPU the library's calls of CUDA are answered by the CPU, so that a peer can be rehearsed, not timed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from peers import plain
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

OPTIONS = {
    "fused": "Bias and GELU, bias, dropout and residual, and the loss are compiled into one kernel each.",
    "flash": "Attention is PyTorch's fused kernel; without it, and without Transformer Engine, scores are written out.",
    "te": "Layers are those of Transformer Engine, where it is installed; it has its own attention and AdamW.",
    "recompute": "Every layer is checkpointed.",
    "recompute-half": "Half of each stage's layers are checkpointed.",
}
CHECKPOINTING = ("", "recompute-half", "recompute")
ENVIRONMENT: Mapping[str, str] = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""One hardware queue keeps a communication kernel from waiting behind the product that it should overlap."""
VOCABULARY_GRAIN = 128
NAME = re.compile(r"megatron(?:-(?=.)(?:tp(?P<tensor>[1-9]\d*))?(?:pp(?P<pipeline>[1-9]\d*))?)?")


def parsed(kind: str) -> tuple[str, frozenset[str]]:
    """Split `megatron-tp2+flash` into its base and its options.

    Raises:
        ValueError: no peer is called so, or a library that it needs is not installed.
    """
    base, *options = kind.split("+")
    if NAME.fullmatch(base) is None:
        raise ValueError(f"{base!r} is no peer of Megatron-Core. Write megatron, or with degrees megatron-tp2pp2.")
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"{base} has no option {option!r}. Its options are {', '.join(sorted(OPTIONS))}.")
    if {"recompute", "recompute-half"} <= set(options) or {"te", "flash"} <= set(options):
        raise ValueError(f"{kind} has two options of which each excludes the other. Keep one of the two.")
    if importlib.util.find_spec("megatron") is None:
        raise ValueError(
            f"{base} needs Megatron-Core, which is not installed. Run pip install -r benchmarks/peers/requirements.txt."
        )
    if "te" in options and not _transformer_engine():
        raise ValueError(f"{kind} needs Transformer Engine, which is not installed. Take flash in place of te.")
    return base, frozenset(options)


def strongest(base: str) -> str:
    """Return `base` with what makes it fast: Transformer Engine where it is installed."""
    options = ("te",) if _transformer_engine() else ("flash",)
    return "+".join([base, *(option for option in ("fused", *options) if option not in base.split("+"))])


def degrees(kind: str) -> tuple[int, int]:
    """Return the tensor- and pipeline-parallel degrees of `megatron-tp2pp2`."""
    found = NAME.fullmatch(kind.partition("+")[0])
    return (int(found["tensor"] or 1), int(found["pipeline"] or 1)) if found else (1, 1)


def fits(kind: str, world: int) -> bool:
    """Return whether a peer runs on so many devices."""
    tensor, pipeline = degrees(kind)
    return world % (tensor * pipeline) == 0


def replicas(kind: str, world: int) -> int:
    """Return the data-parallel degree on so many devices."""
    tensor, pipeline = degrees(kind)
    return world // (tensor * pipeline)


def _transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


class Peer(plain.Peer):
    """One stage of Megatron-Core's model with its schedule and optimiser."""

    def __new__(cls, *_: Any, **__: Any) -> Peer:
        return object.__new__(cls)

    def __init__(self, kind: str, build: Callable[[], nn.Module], micro_batch: int, device: torch.device) -> None:
        base, options = parsed(kind)
        self.micro_batch, self.device, self.tokens = micro_batch, device, 0
        tensor, pipeline = degrees(base)
        with torch.device("meta"):
            sizes: Any = build().config
        with _cuda_calls_on(device):
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()  # what an earlier contender of this process left
            parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
            self.data = parallel_state.get_data_parallel_world_size()
            self.replica = parallel_state.get_data_parallel_rank()
            self.last = parallel_state.is_pipeline_last_stage()
            _seed(device)
            self.model = _wrapped(_model(sizes, tensor, pipeline, options, device), self.data)
            self.optimizer = _optimizer(self.model, device)

    def step(self, batch: plain.Batch) -> torch.Tensor:
        parts = list(plain.micro_batches(batch, self.micro_batch))
        with _cuda_calls_on(self.device):
            from megatron.core.pipeline_parallel import get_forward_backward_func

            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            found = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=iter(parts),
                model=[self.model],
                num_microbatches=len(parts),
                seq_length=batch["input_ids"].shape[1],
                micro_batch_size=self.micro_batch,
            )
            self.optimizer.step()
        self.tokens = batch["input_ids"].numel()
        return torch.stack([one["loss"] for one in found]).mean() if self.last else torch.zeros((), device=self.device)


def _forward_step(parts: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Run one micro-batch forward; return the output of the stage and what makes a loss of the last stage's."""
    part = next(parts)
    labels = part["labels"]
    if "token_type_ids" in part:
        present = torch.ones_like(part["input_ids"])
        output = model(part["input_ids"], present, part["token_type_ids"], labels.clamp(min=0))
        return output, partial(_mean_loss, labels=labels, order=part.get("next_sentence_label"))
    following = functional.pad(labels[:, 1:], (0, 1), value=plain.IGNORED)  # as Hugging Face's causal models shift
    places = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    return model(part["input_ids"], places, None, labels=following.clamp(min=0)), partial(_mean_loss, labels=following)


def _mean_loss(
    output: Any, *, labels: torch.Tensor, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    words, sentence = output if isinstance(output, tuple) else (output, None)
    counts = labels != plain.IGNORED
    loss = (words.float() * counts).sum() / counts.sum()
    if sentence is not None and order is not None:
        loss = loss + functional.cross_entropy(sentence.float(), order)
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place


def _model(sizes: Any, tensor: int, pipeline: int, options: frozenset[str], device: torch.device) -> Any:
    """Return this rank's stage of the GPT or BERT that has the sizes of a Hugging Face configuration."""
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel

    family = sizes.model_type
    if family not in {"gpt2", "bert", "megatron-bert"}:
        raise ValueError(f"Megatron-Core has no model for {family!r}. It has GPT (gpt2) and BERT (bert).")
    shared = {
        "config": _config(sizes, tensor, pipeline, options, device),
        "transformer_layer_spec": _layer(family, options),
        "vocab_size": -(-sizes.vocab_size // (VOCABULARY_GRAIN * tensor)) * VOCABULARY_GRAIN * tensor,
        "max_sequence_length": sizes.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": True,
    }
    model: Any = GPTModel(**shared) if family == "gpt2" else BertModel(num_tokentypes=2, **shared)
    if "flash" in options:
        for layer in (model.decoder if family == "gpt2" else model.encoder).layers:
            layer.self_attention.core_attention = FusedAttention(model.config, causal=family == "gpt2")
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).train()


def _config(sizes: Any, tensor: int, pipeline: int, options: frozenset[str], device: torch.device) -> Any:
    from megatron.core.transformer import TransformerConfig

    gpt, cuda = sizes.model_type == "gpt2", device.type == "cuda"
    fused = "fused" in options
    layers = sizes.num_hidden_layers
    recompute: dict[str, Any] = {}
    if "recompute" in options:
        recompute = {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif "recompute-half" in options:
        recompute = {"recompute_method": "block", "recompute_num_layers": max(1, layers // pipeline // 2)}
    return TransformerConfig(
        num_layers=layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        ffn_hidden_size=(sizes.n_inner if gpt else sizes.intermediate_size) or 4 * sizes.hidden_size,
        hidden_dropout=sizes.resid_pdrop if gpt else sizes.hidden_dropout_prob,
        attention_dropout=sizes.attn_pdrop if gpt else sizes.attention_probs_dropout_prob,
        layernorm_epsilon=sizes.layer_norm_epsilon if gpt else sizes.layer_norm_eps,
        activation_func=functional.gelu if fused or not gpt else partial(functional.gelu, approximate="tanh"),
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=tensor > 1 and "te" in options,  # PyTorch's LayerNorm does not take part in it
        bf16=cuda,
        params_dtype=torch.bfloat16 if cuda else torch.float32,
        pipeline_dtype=torch.bfloat16 if cuda else torch.float32,
        use_cpu_initialization=not cuda,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        cross_entropy_loss_fusion=fused,
        gradient_accumulation_fusion=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,  # of Apex
        recompute_granularity="full" if recompute else None,
        **recompute,
    )


def _layer(family: str, options: frozenset[str]) -> Any:
    """Return Megatron-Core's own specification of a layer."""
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.gpt import gpt_layer_specs

    if "te" in options:
        if family == "gpt2":
            return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        return bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    return gpt_layer_specs.get_gpt_layer_local_spec() if family == "gpt2" else bert_layer_specs.bert_layer_local_spec


class FusedAttention(nn.Module):
    """PyTorch's fused attention in the place of Megatron-Core's, whose scores are written to memory.

    It knows no padding: samples are packed.
    """

    def __init__(self, config: Any, causal: bool) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        self.dropout, self.causal = config.attention_dropout, causal
        self.fork = get_cuda_rng_tracker().fork

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return attention of [sequence, batch, heads, size], as [sequence, batch, heads × size]."""
        heads_first = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        with self.fork():
            found = functional.scaled_dot_product_attention(
                *heads_first, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
            )
        return found.permute(2, 0, 1, 3).flatten(2)


def _wrapped(model: Any, data: int) -> Any:
    """Return the model in Megatron-Core's data parallelism, which shards gradients for the distributed optimiser."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=data > 1,
        overlap_param_gather=data > 1,
    )
    config = model.config
    wrapped = DistributedDataParallel(config, settings, model)
    wrapped.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        config.no_sync_func, config.grad_sync_func = wrapped.no_sync, wrapped.start_grad_sync
    return wrapped


def _optimizer(model: Any, device: torch.device) -> Any:
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, OptimizerConfig, get_megatron_optimizer

    cuda = device.type == "cuda"
    settings = OptimizerConfig(
        lr=plain.LEARNING_RATE,
        bf16=cuda,
        params_dtype=torch.bfloat16 if cuda else torch.float32,
        use_distributed_optimizer=True,
        overlap_param_gather=model.ddp_config.overlap_param_gather,
        clip_grad=plain.CLIP_NORM,
    )
    optimizer = get_megatron_optimizer(settings, [model], config_overrides={}, use_gloo_process_groups=False)
    if USING_PYTORCH_OPTIMIZER:  # neither Transformer Engine nor Apex brings a fused AdamW
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
    config = model.config
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _seed(device: torch.device) -> None:
    if device.type == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    torch.manual_seed(0)


@contextlib.contextmanager
def _cuda_calls_on(device: torch.device) -> Iterator[None]:
    """Answer Megatron-Core's calls of CUDA by the CPU where there is no GPU; written for version 0.16.1."""
    if device.type == "cuda":
        yield
        return
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random

    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (torch.cuda, "current_device", lambda: device),
            (torch.cuda, "synchronize", lambda *_: None),
            (fused_softmax, "get_default_causal_mask", lambda length: torch.ones(length, length).triu(1).bool()),
            (random, "_get_cuda_rng_state", lambda *_, **__: None),
            (random, "_set_cuda_rng_state", lambda *_, **__: None),
            (random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        stack.enter_context(_AsIfCuda())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class _AsIfCuda(TorchFunctionMode):
    """Make tensors where "cuda" is asked for on the CPU, and say of a tensor's type that it is one of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
