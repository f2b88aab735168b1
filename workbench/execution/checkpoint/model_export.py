"""From a checkpoint to `safetensors` under the model's own names: what `from_pretrained` loads.

A checkpoint knows enough of its model (`model.json`) to be exported without building it: nothing of the user's is
imported or unpickled.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from workbench.errors import CheckpointError
from workbench.execution.checkpoint.files import MODEL, Damaged, complete, damage, read_facts, step_of
from workbench.rundir import read_json

FILE_BYTES = 5 * 10**9
"""Of one file; a larger model is written as several with an index, which `from_pretrained` reads as well."""


@dataclass(frozen=True)
class ModelFacts:
    """What an export needs to know of a model."""

    class_name: str
    persistent: tuple[str, ...]
    """Parameters and buffers that belong into a saved model, each tied one once, by its first name."""
    ties: Mapping[str, tuple[str, ...]]
    """First name -> the others."""
    config: Mapping[str, Any] | None
    """`config.json` of a `transformers` model."""
    tensors: Mapping[str, torch.Tensor] = field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        ties = {name: list(others) for name, others in self.ties.items()}
        return {"class": self.class_name, "persistent": list(self.persistent), "ties": ties, "config": self.config}


def describe_model(model: nn.Module) -> ModelFacts:
    """The facts of a built model."""
    tensors: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    ties: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):  # a module's own extra state
            continue
        canonical = first.setdefault(id(tensor), name)
        if canonical == name:
            tensors[name] = tensor
        else:
            ties.setdefault(canonical, []).append(name)
    return ModelFacts(
        class_name=type(model).__name__,
        persistent=tuple(tensors),
        ties={name: tuple(others) for name, others in ties.items()},
        config=_config(model),
        tensors=tensors,
    )


def _config(model: nn.Module) -> dict[str, Any] | None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return None
    found: dict[str, Any] = json.loads(config.to_json_string())
    return {**found, "architectures": [type(model).__name__], "dtype": "float32"}


def export_step(folder: Path, to: Path, step: int | None = None) -> tuple[Path, ...]:
    """Export the last checkpoint in a run's folder of checkpoints, or that of `step`. See `export_checkpoint`."""
    known = {step_of(path): path for path in complete(folder)}
    if step is None and known:
        step = max(known)
    if step not in known:
        asked = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"There are {', '.join(map(str, known))}." if known else "Train with checkpoint_every, or stop the run."
        raise CheckpointError(f"{folder} has {asked}. {there}", step=step, known=tuple(known))
    return export_checkpoint(known[step], to)


def export_checkpoint(checkpoint: Path, to: Path) -> tuple[Path, ...]:
    """Write a checkpoint's model to `to` as `safetensors`, with `config.json` where it is a `transformers` model.

    Tied weights are written once. Returns the files. Raises `CheckpointError` for a checkpoint that is damaged or
    knows nothing of its model, and for a folder that holds a model already.
    """
    facts = read_facts(checkpoint)
    problem = damage(checkpoint, facts.get("files", {}))
    if problem is not None:
        raise Damaged(f"The checkpoint {checkpoint.name} is damaged: {problem} Export an earlier one.")
    if not (checkpoint / MODEL).exists():
        raise CheckpointError(f"{checkpoint} has no {MODEL}, so the model's names are unknown. Save it anew.")
    if to.exists() and (not to.is_dir() or any(to.glob("*.safetensors"))):
        raise CheckpointError(f"{to} holds a model already. Export into another folder.", path=str(to))
    model = read_json(checkpoint / MODEL)
    to.mkdir(parents=True, exist_ok=True)
    _write(_tensors(checkpoint, model["persistent"]), to)
    if model["config"] is not None:
        (to / "config.json").write_text(json.dumps(model["config"], indent=2) + "\n")
    return tuple(sorted(path for path in to.iterdir() if path.suffix in (".safetensors", ".json")))


def _write(tensors: Mapping[str, torch.Tensor], to: Path) -> None:
    parts = list(_parts(tensors))
    if len(parts) == 1:
        save_file(parts[0], to / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, to / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """In order, each of at most `FILE_BYTES` (or one larger tensor)."""
    part: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if part and sum(held.nbytes for held in part.values()) + tensor.nbytes > FILE_BYTES:
            yield part
            part = {}
        part[name] = tensor
    yield part


def _tensors(checkpoint: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """The whole tensors of those names, on the CPU."""
    reader = _Reader(checkpoint)
    index = reader.read_metadata().state_dict_metadata
    found: dict[str, torch.Tensor] = {}
    for name in names:
        entry = index.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{checkpoint} lacks {name} of its model.", path=str(checkpoint), missing=name)
        found[f"model.{name}"] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings(action="ignore"):  # that it reads alone
        dcp_load(found, storage_reader=reader, no_dist=True)
    return {name: found[f"model.{name}"] for name in names}


class _Reader(FileSystemReader):
    """Reads the index of a checkpoint, which is a pickle, without executing anything that it might name."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """Knows the values that `torch.distributed.checkpoint` writes into its index, and no others."""

    KNOWN = (
        *(("torch", name) for name in ("Size", "device")),
        *(("torch.serialization", name) for name in ("_get_layout", "_get_dtype")),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
        ("collections", "OrderedDict"),
    )
    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        value = getattr(torch, name, None) if module == "torch" else None
        plain = isinstance(value, torch.dtype | torch.layout | torch.memory_format)
        if plain or module in self.MODULES or (module, name) in self.KNOWN:
            return super().find_class(module, name)
        raise Damaged(f"The checkpoint's index names {module}.{name}, which does not belong there.")


def _member(kind: Any, name: str) -> Enum:
    """What Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) write for a member of an enumeration: `getattr(kind, name)`;
    of anything else it would reach whatever there is."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise Damaged(f"The checkpoint's index asks for {name} of {kind!r}, which does not belong there.")
    return kind[name]
