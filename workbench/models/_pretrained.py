"""`Pretrained`: a model of `transformers` with the weights of a folder or of the hub, as a value."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import json
import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import Field, PlainValidator

from workbench.base.errors import InvalidExperiment, first_line
from workbench.base.units import many
from workbench.base.validation import Line, Share, Text, Whole, checked_value, known
from workbench.models._named import MOST_LAYERS, quiet

if TYPE_CHECKING:
    from torch import nn

AUTO_CLASSES = {
    "mlm": "AutoModelForMaskedLM",
    "mlm_nsp": "AutoModelForPreTraining",
    "clm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
}
"""Class of `transformers` that loads a model for each task."""
ENDINGS = {
    "ForMaskedLM": "mlm",
    "ForPreTraining": "mlm_nsp",
    "ForCausalLM": "clm",
    "LMHeadModel": "clm",
    "ForConditionalGeneration": "seq2seq",
    "ForSequenceClassification": "classification",
}
"""Task that the end of the name of an architecture in `config.json` stands for."""
DROPOUTS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("dropout", "attention_dropout", "activation_dropout", "dropout_rate"),
)
"""Fields of configurations that are probabilities of dropout inside the model."""
PATTERNS = ("frozen", "new", "unused")
"""Fields that hold patterns of names of weights."""
SHOWN = 4
"""Number of weights that a sentence names."""
CONFIG, LARGEST_CONFIG = "config.json", 2**24
"""Name of the file that describes a model, and its largest size in bytes."""
WEIGHTS = ("*.safetensors", "*.bin")
"""Files of weights in a folder that `transformers` loads."""
DEPTH = re.compile(r"(?:.*_)?layers|n_layer")
NUMBER_OF = re.compile(r"(?:num|n)_.*|.*_(?:size|dim|heads|positions|embeddings|token_id|length)|d_\w+|vocab")
AT_LEAST_ONE = re.compile(
    r"num_hidden_layers|n_layer|(?:hidden|vocab|intermediate)_size|num_attention_heads|n_head|n_embd|d_model"
)
"""Numbers in a `config.json` of layers, of other parts, and of those without which there is no model."""
LARGEST_SIZE = 2**24
"""Largest other number in a `config.json`: that of the sizes of a named model."""
WHOLE = re.compile(r"BOOL|[IU]\d+|(?:torch\.)?(?:bool|u?int\d+)")
"""Types of weights that no training can change."""


@checked_value()
class Pretrained:
    """A model of `transformers` whose weights are loaded where it is built. `wb.models.pretrained` makes it."""

    name: Line
    path: Text
    """Absolute path of a folder, or a name of the hub."""
    config: Text = field(repr=False)
    """Content of `config.json`. A run therefore needs the folder for the weights alone, and only at its start."""
    task: Annotated[str, PlainValidator(known(AUTO_CLASSES))]
    labels: Annotated[Whole, Field(ge=2, le=2**20)] | None = None
    """Number of classes, of a model for classification."""
    frozen: tuple[Line, ...] = ()
    """Patterns (`fnmatch`) of the parameters that training leaves as they are."""
    new: tuple[Line, ...] = ()
    """Patterns of weights that the folder should hold and does not, and which may be drawn at random."""
    unused: tuple[Line, ...] = ()
    """Patterns of weights in the folder that no model of its architecture has, and which may be left out."""
    dropout: Share | None = None
    """Dropout inside the model; None is that of its configuration."""
    revision: Line | None = None
    is_user_defined: ClassVar[bool] = False
    is_loaded: ClassVar[bool] = True

    @property
    def objective(self) -> str | None:
        """Training objective, from which text chooses the fields of a sample; None for classification."""
        return None if self.task == "classification" else self.task

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding."""
        return cast("int | None", getattr(_configuration(self.config).get_text_config(), "vocab_size", None))

    @property
    def max_positions(self) -> int | None:
        """Longest sequence in tokens, None for a model without learned positions."""
        config = _configuration(self.config).get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        # RoBERTa and what derives from it number positions from 2 on, after that of padding.
        offset = 2 if "roberta" in config.model_type or config.model_type in ("camembert", "longformer") else 0
        return None if longest is None else int(longest) - offset

    @property
    def pretrained(self) -> Pretrained:
        """Return this value, which a data source asks what its weights know; other models have None."""
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes of a head that goes on, in the order of their numbers; empty where none is known."""
        config = _configuration(self.config)
        if self.task != "classification" or config.num_labels != self.labels:
            return ()
        names = tuple(str(config.id2label.get(number)) for number in range(config.num_labels))
        return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names

    @property
    def pad_id(self) -> int | None:
        """Id before which a causal model reads the class, as its configuration says it; None for other models."""
        config = _configuration(self.config)
        return config.get_text_config().pad_token_id if self._reads_before_padding(config) else None

    @property
    def lacks_padding(self) -> bool:
        """True for a causal model for classes whose configuration does not say which id is padding: the data do."""
        config = _configuration(self.config)
        return self._reads_before_padding(config) and config.get_text_config().pad_token_id is None

    def _reads_before_padding(self, config: Any) -> bool:
        """Return True if forward looks for the last token that is no padding, as causal models do for the class."""
        import transformers

        if self.task != "classification":
            return False
        found = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), object)
        forwards = [vars(base)["forward"] for base in found.__mro__ if "forward" in vars(base)]
        return any("pad_token_id" in inspect.unwrap(forward).__code__.co_names for forward in forwards)

    def check_weights(self) -> None:
        """Raise `InvalidExperiment` unless a folder holds the weights of this model; their values are not read.

        A name of the hub is not asked for.
        """
        folder = Path(self.path)
        if folder.is_absolute() and not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
            raise InvalidExperiment(
                f"{self.name} starts from the weights in {folder}, and no file {' or '.join(WEIGHTS)} is there any "
                "more. Put the folder back, or describe the model anew with wb.models.pretrained(other_folder). A run "
                "that has a checkpoint goes on without the folder: run.resume()."
            )
        if folder.is_absolute():
            with quiet():
                self._loaded(*self._class_and_configuration(), device_map="meta")

    def build(self, loads: bool = True, pad_id: int | None = None) -> nn.Module:
        """Return the module in train mode with the loaded weights in fp32, on the ambient device.

        What the architecture of the folder has not, such as a new head, has fresh weights. Under
        `with torch.device("meta")`, and with `loads=False` for weights that a checkpoint will replace, nothing is
        loaded and the folder is not needed. `pad_id` is that of the data, for a model that `lacks_padding`; None takes
        the end token. Raises `InvalidExperiment` for a folder that does not hold the weights of such a model, for
        weights that are not finite, and for a pattern of `frozen` that matches no parameter.
        """
        import torch

        auto, config = self._class_and_configuration()
        with quiet():
            if torch.get_default_device().type == "meta" or not loads:
                module = auto.from_config(config, dtype=torch.float32)
            else:
                module = self._loaded(auto, config)
        text = module.config.get_text_config()
        if self._reads_before_padding(config) and text.pad_token_id is None:
            # Only now, since an embedding that is built with an id of padding does not train its row.
            ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
            text.pad_token_id = ends[0] if pad_id is None else pad_id
        names = [name for name, _ in module.named_parameters()]
        for pattern in self.frozen:
            if not fnmatch.filter(names, pattern):
                raise InvalidExperiment(
                    f"frozen has the pattern {pattern!r}, which matches none of the {len(names)} parameters of "
                    f"{self.name}, such as {names[0]} and {names[-1]}. Remove or correct it."
                )
        for name, parameter in module.named_parameters():
            if any(fnmatch.fnmatch(name, pattern) for pattern in self.frozen):
                parameter.requires_grad_(False)
        return cast("nn.Module", module.train())

    def _class_and_configuration(self) -> tuple[Any, Any]:
        import transformers

        config = _configuration(self.config)
        config.use_cache = False
        if self.labels is not None:
            config.num_labels, config.problem_type = self.labels, "single_label_classification"
        for name in DROPOUTS if self.dropout is not None else ():
            if isinstance(getattr(config, name, None), float | int):
                setattr(config, name, self.dropout)
        return getattr(transformers, AUTO_CLASSES[self.task]), config

    def _loaded(self, auto: Any, config: Any, **where: Any) -> Any:
        import torch

        options = {"config": config, "dtype": torch.float32, "revision": self.revision or "main", **where}
        options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        try:
            module, info = auto.from_pretrained(self.path, **options)
        except Exception as error:  # the library raises every type
            said = first_line(error)
            if "weights_only" in str(error):  # torch's advice is to run what the file holds
                said = "its file of weights is a pickle that names code besides tensors, and none is run"
            raise InvalidExperiment(
                f"{self.path} cannot be loaded as a model for {self.task!r}: {said}. Give a folder that "
                "run.export or save_pretrained wrote, or another task."
            ) from error
        parameters = dict(module.named_parameters())
        resized = {name for name, *_ in info["mismatched_keys"]}
        other = sorted(
            name for name in resized if self.labels is None or parameters[name].shape[:1] != torch.Size([self.labels])
        )
        if other:
            raise InvalidExperiment(
                f"{self.path} holds {len(other)} parameters of other shapes than its config.json says, such as "
                f"{other[0]}. Give a folder whose files belong together."
            )
        known = self._own_names(module) if info["missing_keys"] or info["unexpected_keys"] else set()
        bare = f"{module.base_model_prefix}."
        missing = [name for name in sorted(info["missing_keys"]) if name.removeprefix(bare) in known]
        alien = [name for name in sorted(info["unexpected_keys"]) if name.removeprefix(bare) not in known]
        self._check_differing(missing, alien, len(parameters))
        whole = [name for name, kind in _types_in(Path(self.path)).items() if WHOLE.fullmatch(kind)]
        trained = {name.removeprefix(bare) for name in parameters}
        if whole := sorted(name for name in whole if name.removeprefix(bare) in trained):
            raise InvalidExperiment(
                f"{self.path} holds {many(len(whole), 'weight')} as whole numbers or truth values, such as "
                f"{whole[0]}, which training cannot change. Give a folder whose weights are floating-point numbers."
            )
        for name, parameter in parameters.items() if not where else ():
            if not torch.isfinite(parameter).all():
                wrong = int((~torch.isfinite(parameter)).sum())
                raise InvalidExperiment(
                    f"{self.path} holds {name} with {wrong:,} of {parameter.numel():,} values that are NaN or "
                    "infinite. Give the folder of a model whose training did not diverge."
                )
        return module

    def _own_names(self, module: Any) -> set[str]:
        """Return the names of the weights of the folder's own architecture, without the prefix of its body."""
        import torch
        import transformers

        config = _configuration(self.config)
        own = getattr(transformers, (config.architectures or [""])[0], type(module))
        if own is not type(module):
            with torch.device("meta"):
                module = own(config)
        return {name.removeprefix(f"{module.base_model_prefix}.") for name in module.state_dict()}

    def _check_differing(self, missing: list[str], alien: list[str], total: int) -> None:
        """Raise `InvalidExperiment` for weights that are missing, or nobody's, and were not accepted by name."""
        said, remedies = list[str](), list[str]()
        for option, patterns, names, what, clause in (
            ("new", self.new, missing, "lacks", f" of the {total:,} weights that its architecture has"),
            ("unused", self.unused, alien, "holds", " that its architecture does not have"),
        ):
            for pattern in patterns:
                if not fnmatch.filter(names, pattern):
                    raise InvalidExperiment(
                        f"{option} has the pattern {pattern!r}, which matches none of the {len(names)} weights in "
                        f"which {self.path} differs from its architecture so. Remove or correct it."
                    )
            rest = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
            if rest:
                shown = ", ".join(rest[:SHOWN]) + (", …" if len(rest) > SHOWN else "")
                number = f"{len(rest):,}" if what == "lacks" else many(len(rest), "weight")
                said.append(f"{what} {number}{clause} ({shown})")
                remedies.append(f"{option}=[{rest[0]!r}{', …' if len(rest) > 1 else ''}]")
        if said:
            raise InvalidExperiment(
                f"{self.path} {' and '.join(said)}. Give the whole folder of one model, or accept them by name, or by "
                f"pattern: wb.models.pretrained(…, {', '.join(remedies)}). What is missing begins at random, and what "
                "nobody has is left out."
            )

    def to_json(self) -> dict[str, Any]:
        names = {name: list(getattr(self, name)) for name in PATTERNS}
        return {"type": "pretrained", **vars(self), "config": json.loads(self.config), **names}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Pretrained:
        """Rebuild the value from the fields that `to_json` wrote."""
        names = {name: tuple(fields.get(name, ())) for name in PATTERNS}
        return cls(**{**fields, "config": json.dumps(fields["config"], sort_keys=True), **names})


def _configuration(text: str) -> Any:
    """Return the configuration of `transformers` that a `config.json` describes; a copy, which may be changed."""
    from copy import deepcopy

    return deepcopy(_parsed(text))


@functools.cache
def _parsed(text: str) -> Any:
    from transformers import CONFIG_MAPPING

    described = json.loads(text)
    _check_numbers(described, "The stored configuration of a pretrained model")
    try:
        return CONFIG_MAPPING[described["model_type"]].from_dict(described)
    except Exception as error:  # the library raises every type
        raise InvalidExperiment(
            f"The stored configuration of a pretrained model cannot be read: {first_line(error)}. Describe the model "
            "anew: wb.models.pretrained(folder)."
        ) from error


def _check_numbers(described: Any, where: str) -> None:
    """Raise `InvalidExperiment` for a number in a `config.json` that no model has, before anything is made of it."""
    if isinstance(described, Mapping):
        for name, value in described.items():
            _check_numbers(value, where)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            least, most = (0, MOST_LAYERS) if DEPTH.fullmatch(name) else (-1, LARGEST_SIZE)
            least = 1 if AT_LEAST_ONE.fullmatch(name) else least
            if (DEPTH.fullmatch(name) or NUMBER_OF.fullmatch(name)) and not least <= value <= most:
                raise InvalidExperiment(
                    f"{where} has {name}={value:,}, which must lie between {least:,} and {most:,}. Correct its "
                    "config.json, or give another folder."
                )
    elif isinstance(described, list):
        for item in described:
            _check_numbers(item, where)


def _types_in(folder: Path) -> dict[str, str]:
    """Return the type of each tensor in a folder's files of weights, from their headers."""
    import torch

    types = dict[str, str]()
    for file in sorted(folder.glob(WEIGHTS[0])) if folder.is_absolute() else ():
        with file.open("rb") as opened:
            described = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        types |= {name: tensor["dtype"] for name, tensor in described.items() if name != "__metadata__"}
    for file in sorted(folder.glob(WEIGHTS[1])) if folder.is_absolute() and not types else ():
        held = torch.load(file, map_location="meta", weights_only=True)
        types |= {name: str(tensor.dtype) for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}
    return types


def described(
    folder_or_name: str | Path, task: str | None, labels: int | None, revision: str | None, **options: Any
) -> Pretrained:
    """Return the value for a folder or a name; the task is that of its configuration unless it is given."""
    given = Path(folder_or_name).expanduser()
    path = str(given.absolute()) if os.path.isdir(given) else str(folder_or_name)
    import transformers

    if os.path.isfile(file := os.path.join(path, CONFIG)):
        if os.path.getsize(file) > LARGEST_CONFIG:
            raise InvalidExperiment(
                f"{file} has {os.path.getsize(file):,} bytes, and a configuration at most {LARGEST_CONFIG:,}. Give the "
                "folder of a model."
            )
        written = None
        with contextlib.suppress(OSError, ValueError):  # which AutoConfig words
            written = json.loads(Path(file).read_text())
        _check_numbers(written, path)  # before a name is made for each of 10⁹ labels
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, revision=revision or "main", local_files_only=Path(path).is_dir(), trust_remote_code=False
        )
    except Exception as error:  # the library raises every type
        raise InvalidExperiment(
            f"There is no model of transformers at {path}: {first_line(error)}. Give a folder that run.export or "
            "save_pretrained wrote, or a name of the hub that can be reached from here."
        ) from error
    names = config.architectures or [""]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise InvalidExperiment(
            f"{path} has architectures={names!r:.80}, which is no list of names. Correct its config.json: the name of "
            "the model's class in transformers, such as ['BertForMaskedLM']."
        )
    learned = next((task for ending, task in ENDINGS.items() if names[0].endswith(ending)), None)
    if task is None:
        task = learned if labels is None else "classification"
    if task is None:
        raise InvalidExperiment(
            f"{path} holds a {names[0] or 'model'} and does not say what it learns. Give task, one of "
            f"{', '.join(AUTO_CLASSES)}."
        )
    if task == learned == "classification" and labels is None:
        labels = config.num_labels
    if (task == "classification") != (labels is not None):
        what = "needs labels, the number of classes" if labels is None else "and labels are of classification"
        raise InvalidExperiment(f"The task {task!r} {what}. Write wb.models.pretrained(…, labels=2), or another task.")
    if options.get("name") is None:
        options["name"] = f"{Path(path).name}-{task}"
    options |= {name: tuple(options.get(name, ())) for name in PATTERNS}
    values = json.loads(config.to_json_string(use_diff=False))
    values.pop("_name_or_path", None)  # which is not of the model
    described = json.dumps(values, sort_keys=True)
    return Pretrained(path=path, config=described, task=task, labels=labels, revision=revision, **options)
