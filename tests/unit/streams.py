"""A stream of samples that one process makes and this one reads."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

from workbench.data.streaming import Feeder, Ring, SampleStream, new_ring_file, ring_for


@contextlib.contextmanager
def written_here(stream: SampleStream, samples: int, vocabulary: int) -> Iterator[Ring]:
    """Write the first samples of a stream in this process, which may read each of them several times."""
    descriptor, path = new_ring_file()
    path.unlink()
    ring = ring_for(stream, descriptor, samples, 1, vocabulary)
    ring.clear(0)
    ring.begin(0)
    for chunk in itertools.takewhile(lambda chunk: chunk.first < samples, stream.chunks(None)):
        ring.write(chunk.first, chunk.records)
    try:
        yield ring
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def fed_alone(stream: SampleStream, samples: int, vocabulary: int) -> Iterator[Ring]:
    """Feed the first samples of a stream to this process, which may read each of them several times."""
    descriptor, path = new_ring_file()
    path.unlink()
    ring = ring_for(stream, descriptor, samples, 1, vocabulary)
    ring.clear(0)
    feeder = Feeder(stream, ring, 0, None)
    try:
        yield ring
    finally:
        feeder.close()
        os.close(descriptor)
