"""`Pretrained`: a model of `transformers` with the weights of a folder or of the hub, as a value."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import Field, PlainValidator

from workbench.errors import InvalidExperiment, first_line
from workbench.models._named import quiet
from workbench.validation import Line, Share, Text, Whole, checked_value, known

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
WEIGHTS = ("*.safetensors", "*.bin")
"""Files of weights in a folder that `transformers` loads."""
LEAST_LOADED = 0.5
"""Least share of a model's parameters that must come from the folder; below, its names are those of another model."""


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
        """Raise `InvalidExperiment` if the folder of the weights has gone; a name of the hub is not asked for."""
        folder = Path(self.path)
        if folder.is_absolute() and not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
            raise InvalidExperiment(
                f"{self.name} starts from the weights in {folder}, and no file {' or '.join(WEIGHTS)} is there any "
                "more. Put the folder back, or describe the model anew with wb.models.pretrained(other_folder). A run "
                "that has a checkpoint goes on without the folder: run.resume()."
            )

    def build(self, loads: bool = True, pad_id: int | None = None) -> nn.Module:
        """Return the module in train mode with the loaded weights in fp32, on the ambient device.

        What the folder has not, such as a new head, has fresh weights. Under `with torch.device("meta")`, and with
        `loads=False` for weights that a checkpoint will replace, nothing is loaded and the folder is not needed.
        `pad_id` is that of the data, for a model that `lacks_padding`; None takes the end token. Raises
        `InvalidExperiment` for a folder that does not hold the weights of such a model, and for a pattern of `frozen`
        that matches no parameter.
        """
        import torch
        import transformers

        config = _configuration(self.config)
        config.use_cache = False
        if self.labels is not None:
            config.num_labels, config.problem_type = self.labels, "single_label_classification"
        for name in DROPOUTS if self.dropout is not None else ():
            if isinstance(getattr(config, name, None), float | int):
                setattr(config, name, self.dropout)
        auto = getattr(transformers, AUTO_CLASSES[self.task])
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

    def _loaded(self, auto: Any, config: Any) -> Any:
        import torch

        options = {"config": config, "dtype": torch.float32, "revision": self.revision or "main"}
        options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        try:
            module, info = auto.from_pretrained(self.path, **options)
        except Exception as error:  # the library raises every type
            raise InvalidExperiment(
                f"{self.path} cannot be loaded as a model for {self.task!r}: {first_line(error)}. Give a folder that "
                "run.export or save_pretrained wrote, or another task."
            ) from error
        parameters = dict(module.named_parameters())
        other = [name for name, *_ in sorted(info["mismatched_keys"])]
        body = [name for name in other if name.startswith(f"{module.base_model_prefix}.")]
        if body:
            raise InvalidExperiment(
                f"{self.path} holds {len(body)} parameters of other shapes than its config.json says, such as "
                f"{body[0]}. Give a folder whose files belong together."
            )
        missing = sum(parameters[name].numel() for name in {*info["missing_keys"], *other} if name in parameters)
        total = sum(parameter.numel() for parameter in parameters.values())
        if missing > (1 - LEAST_LOADED) * total:
            raise InvalidExperiment(
                f"{self.path} holds {total - missing:,} of the {total:,} parameters of {type(module).__name__}, so "
                "that most of it would be trained from the beginning. Give the folder of a model of that architecture."
            )
        return module

    def to_json(self) -> dict[str, Any]:
        return {"type": "pretrained", **vars(self), "config": json.loads(self.config), "frozen": list(self.frozen)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Pretrained:
        """Rebuild the value from the fields that `to_json` wrote."""
        own = {"config": json.dumps(fields["config"], sort_keys=True), "frozen": tuple(fields["frozen"])}
        return cls(**{**fields, **own})


def _configuration(text: str) -> Any:
    """Return the configuration of `transformers` that a `config.json` describes; a copy, which may be changed."""
    from copy import deepcopy

    return deepcopy(_parsed(text))


@functools.cache
def _parsed(text: str) -> Any:
    from transformers import CONFIG_MAPPING

    described = json.loads(text)
    try:
        return CONFIG_MAPPING[described["model_type"]].from_dict(described)
    except Exception as error:  # the library raises every type
        raise InvalidExperiment(
            f"The stored configuration of a pretrained model cannot be read: {first_line(error)}. Describe the model "
            "anew: wb.models.pretrained(folder)."
        ) from error


def described(
    folder_or_name: str | Path, task: str | None, labels: int | None, revision: str | None, **options: Any
) -> Pretrained:
    """Return the value for a folder or a name; the task is that of its configuration unless it is given."""
    given = Path(folder_or_name).expanduser()
    path = str(given.absolute()) if os.path.isdir(given) else str(folder_or_name)
    import transformers

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
    options["frozen"] = tuple(options.get("frozen", ()))
    values = json.loads(config.to_json_string(use_diff=False))
    values.pop("_name_or_path", None)  # which is not of the model
    described = json.dumps(values, sort_keys=True)
    return Pretrained(path=path, config=described, task=task, labels=labels, revision=revision, **options)
