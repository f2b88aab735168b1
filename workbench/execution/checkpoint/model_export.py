"""Read a checkpoint that somebody else may have written, and export it as `safetensors`, as `from_pretrained` loads it.

A checkpoint describes its model (`model.json`), so that it is exported without building the model. Nothing of the
user's code is imported or unpickled, and nothing that the checkpoint's index names is executed.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from workbench.base.errors import CheckpointError, in_words
from workbench.capture.blocks.block_extraction import canonical_names
from workbench.data.store import tokenizer_files
from workbench.data.tokenizer import CONFIG, SpecialTokens
from workbench.execution.checkpoint import files
from workbench.experiment import Experiment
from workbench.record.rundir import RunDir, read_json, remedy_for, write_json

# Reading


class GuardedReader(FileSystemReader):
    """Reads the index of a checkpoint, which is a pickle, without executing anything that the pickle names.

    Entries that are no tensors are refused, because `torch.distributed.checkpoint` would unpickle their content.
    """

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                metadata: Metadata = _IndexUnpickler(stream).load()
            entries = dict(metadata.state_dict_metadata)
        except files.DamagedCheckpoint:
            raise
        except Exception as error:  # bytes that are no pickle raise errors of many types
            raise files.DamagedCheckpoint(f"{file} is no index of a checkpoint ({in_words(error)}).") from None
        for name, entry in entries.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise files.DamagedCheckpoint(f"{file} says that {name} is no tensor. Workbench stores tensors only.")
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles the types of values that `torch.distributed.checkpoint` writes into its index, and no others."""

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
        is_plain = isinstance(value, torch.dtype | torch.layout | torch.memory_format)
        if is_plain or module in self.MODULES or (module, name) in self.KNOWN:
            return super().find_class(module, name)
        raise files.DamagedCheckpoint(f"The checkpoint's index names {module}.{name}, which does not belong there.")


def _member(enumeration: Any, name: str) -> Enum:
    """Return a member of an enumeration, in place of `getattr`, which would reach any attribute of any object.

    Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickle a member as `getattr(enumeration, name)`.
    """
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum) and name in enumeration.__members__):
        raise files.DamagedCheckpoint(
            f"The checkpoint's index asks for {name} of {enumeration!r}, which does not belong there."
        )
    return enumeration[name]


# The export, under the model's own names

_ROOM = "Give a folder on a disk with more room."
FILE_BYTES = 5 * 10**9
"""Largest size of one file; a larger model becomes several files with an index, as `from_pretrained` reads them."""


def describe_model(model: nn.Module, class_names: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what an export needs to know of a built model, as JSON, and its persistent tensors by name.

    `persistent` names the parameters and buffers of a saved model, tied ones once, under their first name; `ties` has
    the other names of these; `config` is the content of `config.json`, if the model is one of `transformers`. It has
    the names of the data's classes if its head has as many outputs.
    """
    state = model.state_dict(keep_vars=True)
    every = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}  # not extra state
    canonical, ties = canonical_names(every.items())
    tensors = {name: tensor for name, tensor in every.items() if canonical[id(tensor)] == name}
    config: Any = getattr(model, "config", None)
    text = config.to_json_string() if hasattr(config, "to_json_string") else None
    architecture = {"architectures": [type(model).__name__], "dtype": "float32"}
    full_config = None if text is None else {**json.loads(text), **architecture}
    if full_config is not None and class_names and getattr(config, "num_labels", None) == len(class_names):
        full_config["id2label"] = {str(number): name for number, name in enumerate(class_names)}
        full_config["label2id"] = {name: number for number, name in enumerate(class_names)}
    return {"class": type(model).__name__, "persistent": list(tensors), "ties": ties, "config": full_config}, tensors


def write_tokenizer(experiment: Experiment, run: RunDir) -> None:
    """Copy the tokeniser of the experiment's text into the run's folder, from which exports take it."""
    source = experiment.reading.tokenizer_folder()
    if source is None:
        return
    before = files.requested_checkpoint(run)
    if before is not None and not source.is_dir():  # the cache was emptied, and the run that goes on holds the files
        source = RunDir(before.parent.parent).tokenizer
    if source == run.tokenizer:
        return
    run.tokenizer.mkdir(exist_ok=True)
    for name in tokenizer_files(source):
        shutil.copyfile(source / name, run.tokenizer / name)
    # Pipelines cut a text to the model's length where the tokeniser names it, as those of models do.
    longest = getattr(experiment.model, "max_positions", None) or experiment.seq_len
    write_json(run.tokenizer / CONFIG, {"model_max_length": longest, **read_json(run.tokenizer / CONFIG)})


def export_step(folder: Path, to: Path, step: int | None = None) -> tuple[Path, ...]:
    """Export the last checkpoint in a run's folder of checkpoints, or that of `step`; see `export_checkpoint`."""
    known = {files.step_of(path): path for path in files.complete_checkpoints(folder)}
    if step is None and known:
        step = max(known)
    if step not in known:
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        hint = f"There are {', '.join(map(str, known))}." if known else "Train with checkpoint_every, or stop the run."
        raise CheckpointError(f"{folder} has {missing}. {hint}")
    return export_checkpoint(known[step], to)


def export_checkpoint(checkpoint: Path, to: Path) -> tuple[Path, ...]:
    """Write a checkpoint's model to the folder `to` as `safetensors`, with `config.json` if `transformers` made it.

    The tokeniser of the run's text comes with it, for `AutoTokenizer` and pipelines, and `config.json` then names its
    end of a document, at which generation ends. Tied weights are written once. Returns the files. Raises
    `CheckpointError` if the checkpoint is damaged or does not describe its model, and if the folder holds a model
    already.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    problem = files.find_damage(checkpoint, files.read_manifest(checkpoint).get("files", {}))
    if problem is not None:
        raise files.DamagedCheckpoint(f"The checkpoint {checkpoint.name} is damaged: {problem} Export an earlier one.")
    if not (checkpoint / files.MODEL).exists():
        raise CheckpointError(
            f"{checkpoint} has no {files.MODEL}, so the model's names are unknown. Export a checkpoint that wb.launch "
            "wrote."
        )
    if to.exists() and (not to.is_dir() or any(to.glob("*.safetensors"))):
        raise CheckpointError(f"{to} holds a model already. Export into another folder.")
    model, before = read_json(checkpoint / files.MODEL), set(to.iterdir()) if to.is_dir() else None

    # Whole tensors in the host's memory: the averages of weights, where there are any
    reader = GuardedReader(checkpoint)
    index = reader.read_metadata().state_dict_metadata
    read: dict[str, torch.Tensor] = {}
    keys = {n: f"average.{n}" if f"average.{n}" in index else f"model.{n}" for n in model["persistent"]}
    for name, key in keys.items():
        entry = index.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{checkpoint} lacks the tensor {name} of its model. Export another checkpoint.")
        read[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings(action="ignore"):  # torch warns that no process group exists.
        dcp_load(read, storage_reader=reader, no_dist=True)
    tensors = {name: read[key] for name, key in keys.items()}

    # The files; those of an export that fails are deleted.
    tokenizer = RunDir(checkpoint.parent.parent).tokenizer
    try:
        to.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, to, max_shard_size=FILE_BYTES)
        if model["config"] is not None:
            config = dict(model["config"])
            if tokenizer.is_dir():
                tokens = SpecialTokens.of_folder(tokenizer)
                begin = tokens.end if tokens.begin is None else tokens.begin
                if tokens.end is not None and begin is not None:
                    config |= {"bos_token_id": begin, "eos_token_id": tokens.end}
            (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in tokenizer_files(tokenizer)[:-1] if tokenizer.is_dir() else ():
            shutil.copyfile(tokenizer / name, to / name)
    except (OSError, SafetensorError) as error:
        for path in set(to.iterdir()) - (before or set()) if to.is_dir() else ():
            path.unlink(missing_ok=True)  # half a model, which takes the room that lacks
        if before is None and to.is_dir():
            to.rmdir()
        why, remedy = (error.strerror, remedy_for(error)) if isinstance(error, OSError) else (str(error), _ROOM)
        raise CheckpointError(f"The model cannot be written to {to}: {why}. {remedy}") from None
    return tuple(sorted(set(to.iterdir()) - (before or set())))
