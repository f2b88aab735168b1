"""Plans and peers asked for by hand, in a benchmark's `--plan` and `--peer`."""

from __future__ import annotations

from typing import Any

SYNTAX = (
    "pipeline,data,zero,micro_batch,recompute; none is checkpointed if that is left out; then name=value, as wb.plan"
)


def degrees(text: str) -> dict[str, Any]:
    """What `wb.plan` is told: `2,1,0,16,selective,tensor=2`."""
    given = [part for part in text.split(",") if "=" not in part]
    named = dict(part.split("=") for part in text.split(",") if "=" in part)
    pipeline, data, zero, micro_batch, *rest = given
    fixed = {"pipeline": int(pipeline), "data": int(data), "zero": int(zero), "micro_batch": int(micro_batch)}
    return fixed | {"recompute": rest[0] if rest else "none"} | {name: _value(text) for name, text in named.items()}


def peer(text: str) -> tuple[str, int]:
    """Split `fsdp+labelled-head,64` into a peer's kind and micro-batch; raise `ValueError` without a micro-batch."""
    kind, _, size = text.partition(",")
    if not size.isdigit() or int(size) < 1:
        raise ValueError(f"--peer {text} does not name a micro-batch. Write the kind and the micro-batch: fsdp,64.")
    return kind, int(size)


def _value(text: str) -> Any:
    return int(text) if text.isdigit() else {"true": True, "false": False}.get(text, text)
