"""Reading of a checkpoint that somebody else may have written: nothing that its index names is executed."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from workbench.errors import in_words
from workbench.execution.checkpoint.files import DamagedCheckpoint


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
        except DamagedCheckpoint:
            raise
        except Exception as error:  # bytes that are no pickle raise errors of many types
            raise DamagedCheckpoint(f"{file} is no index of a checkpoint ({in_words(error)}).") from None
        for name, entry in entries.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise DamagedCheckpoint(f"{file} says that {name} is no tensor. Workbench stores tensors only.")
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
        raise DamagedCheckpoint(f"The checkpoint's index names {module}.{name}, which does not belong there.")


def _member(enumeration: Any, name: str) -> Enum:
    """Return a member of an enumeration, in place of `getattr`, which would reach any attribute of any object.

    Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickle a member as `getattr(enumeration, name)`.
    """
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum) and name in enumeration.__members__):
        raise DamagedCheckpoint(
            f"The checkpoint's index asks for {name} of {enumeration!r}, which does not belong there."
        )
    return enumeration[name]
