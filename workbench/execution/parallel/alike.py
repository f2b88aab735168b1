"""Compare what all ranks hold in common when they have built the model, and take from rank 0 what differs.

Every generator is seeded alike, so that ranks build the same model. They differ all the same where a constructor asks
the system for random numbers (`numpy.random.default_rng()`), the clock or the rank, or goes through a set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workbench.capture import Graph
from workbench.errors import PlanMismatch

ROW = 512
"""Words of 8 bytes that are added up before their positions count, in large tensors."""
LARGE = 2**14
"""Number of words from which a tensor is large: adding up first makes its digest several times faster."""
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) as signed integers."""
Digests = Mapping[str, tuple[str, ...]]
"""Shape, type and hash of a tensor by its name, or the hash of what a block computes."""


def held_tensors(model: nn.Module, graphs: Iterable[Graph]) -> dict[str, torch.Tensor]:
    """Return by name the parameters and buffers of a model, the tensors that its modules have as plain attributes, and
    the constants of its graphs.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{path}.{key}" if path else key: value for key, value in attributes.items()}
    constants = (graph.constants.items() for graph in graphs)
    return tensors | {f"{name} ({at})": each for at, named in enumerate(constants) for name, each in named}


def digests(tensors: Mapping[str, torch.Tensor], graphs: Iterable[Graph]) -> Digests:
    """Return the digests of tensors, and of what each block of the graphs computes, with the numbers in its code."""
    blocks = {f"block {b.name} ({at})": (b.block_type,) for at, graph in enumerate(graphs) for b in graph.blocks}
    values = {name: _strided(tensor) for name, tensor in tensors.items()}
    hashes = _hashes({name: value for name, value in values.items() if not value.is_meta})
    return blocks | {
        name: (str(tuple(value.shape)), str(tensors[name].dtype), hashes.get(name, "no values"))
        for name, value in values.items()
    }


def _hashes(values: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a hash of the bytes of each tensor, computed on its device, and fetched from each device at once.

    Each word of 8 bytes is scattered with its position in the tensor, and the results are added up modulo 2**64. In a
    large tensor, the order of the words within a row of `ROW` does not count.

    A core of a CPU reads them about as fast as its memory gives them: the 438 MB of BERT-Base take 0.04 s of the 8.1 s
    in which a rank imports what it needs (4.9 s), builds and captures the model (3.2 s).
    """
    hashes: dict[str, str] = {}
    words = {name: _words(value) for name, value in values.items()}
    for device in {each.device for each in words.values()}:
        here = {name: each for name, each in words.items() if each.device == device}
        sizes = [len(each) for each in here.values()]
        positions = torch.arange(1, max(sizes) + 1, device=device) * _STEP
        mixed = torch.cat(list(here.values())) + torch.cat([positions[:size] for size in sizes])
        mixed = (mixed ^ (mixed >> 30)) * _FIRST
        mixed = (mixed ^ (mixed >> 27)) * _SECOND
        sums = torch.stack([part.sum() for part in (mixed ^ (mixed >> 31)).split(sizes)])
        hashes |= {name: f"{found:x}" for name, found in zip(here, sums.tolist(), strict=True)}
    return hashes


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor of any layout, in one that has bytes of its own."""
    data = tensor.detach()
    if data.is_nested:
        return torch.cat([each.reshape(-1) for each in data.unbind()])
    if data.is_quantized:
        return data.int_repr()
    return (data if data.layout is torch.strided else data.to_dense()).resolve_conj().resolve_neg()


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in words of 8, those of the last, incomplete one apart, or the sums of its rows."""
    octets = data.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = len(octets) // 8 * 8
    words, rest = octets[:whole].view(torch.int64), octets[whole:].to(torch.int64)
    if len(words) >= LARGE:
        rows = len(words) // ROW * ROW
        words, rest = words[:rows].view(-1, ROW).sum(1), torch.cat([words[rows:], rest])
    return torch.cat([words, rest]) if len(rest) else words


def share(model: str, own: Digests, tensors: Mapping[str, torch.Tensor], device: torch.device) -> list[str]:
    """Give every rank the values of rank 0 in those tensors that differ, and return their names; a collective.

    `own` are the digests of this rank. `tensors` may lack some of them, because they have been freed. Raises
    `PlanMismatch` on every rank for what cannot be taken over: what a block computes, or a tensor that is freed or has
    another shape.
    """
    first: list[Any] = [own]
    dist.broadcast_object_list(first, src=0)
    expected: Digests = first[0]
    mine = {name: own.get(name, ()) for name in {**expected, **own} if expected.get(name) != own.get(name)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, unlike in enumerate(everyone):
        for name, found in unlike.items():
            if name not in tensors or len(found) < 2 or found[:-1] != expected.get(name, ())[:-1]:
                plain = name.split(" (")[0]
                what = f"the value of {plain}" if len(found or expected[name]) > 1 else f"what its {plain} computes"
                raise PlanMismatch(
                    f"{model} is not the same on every rank: {what} is another on rank {rank} than on "
                    "rank 0, although Python's, NumPy's and torch's generators were seeded alike. Its constructor asks "
                    "for something that no seed decides: the system's random numbers, such as those of "
                    "numpy.random.default_rng(), the clock, the rank, or the order of a set. Seed what it draws, for "
                    "instance by numpy.random.default_rng(torch.initial_seed())."
                )
    taken = list({name: rank for rank, unlike in enumerate(everyone) for name in unlike})
    with torch.no_grad():
        for name in taken:
            value = tensors[name].detach().to(device).contiguous()
            dist.broadcast(value.view(-1).view(torch.uint8), src=0)
            tensors[name].detach().copy_(value)
    return taken
