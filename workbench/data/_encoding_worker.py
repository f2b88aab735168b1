"""One process that tokenises: reads blocks from standard input and writes their token ids, until its input ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from typing import Any

from workbench.data._encoding import Encoder, encode
from workbench.errors import DataError


def main() -> None:
    """Encode the blocks of standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a library prints must not stand between the answers.
    with contextlib.suppress(EOFError, BrokenPipeError):
        encoder: Encoder = pickle.load(sys.stdin.buffer)
        tokenizer = encoder.load()
        while True:
            block = pickle.load(sys.stdin.buffer)
            try:
                answer: Any = encode(block, tokenizer, encoder)
            except DataError as error:
                answer = error
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()


if __name__ == "__main__":
    main()
