"""Fingerprint of the samples that an experiment trains on, by which a continuation finds that they have changed."""

from __future__ import annotations

import hashlib
from typing import Any

SAMPLED = 4
"""Number of samples at each end of the training that enter the fingerprint of its data."""


def data_fingerprint(experiment: Any) -> str | None:
    """Return SHA-256 over the first and the last samples that training will see; None for data that raises.

    Equal fingerprints mean the same text, tokenisation, order and masking at both ends of the training, and of the
    held-out samples if there are any.
    """
    try:
        digest = _digest_of_ends(experiment.data.dataset(experiment), hashlib.sha256())
        if experiment.evaluate is not None:
            own = experiment.eval_data
            held = experiment.data.held_out(experiment) if own is None else own.held_out(experiment, experiment.data)
            digest = _digest_of_ends(held, digest)
    except Exception:  # user-defined data may raise anything; training will report it
        return None
    return str(digest.hexdigest())


def _digest_of_ends(dataset: Any, digest: Any) -> Any:
    """Add the length of a dataset, its first and its last samples to a digest, and return it."""
    import numpy as np

    digest.update(str(len(dataset)).encode())
    if (identity := getattr(dataset, "identity", None)) is not None:  # no sample of a stream is made before training
        digest.update(identity.encode())
        return digest
    indices = {*range(min(SAMPLED, len(dataset))), *range(max(0, len(dataset) - SAMPLED), len(dataset))}
    for index in sorted(indices):
        for name, value in sorted(dataset[index].items()):
            array = np.ascontiguousarray(value)
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest
