"""Measure tokenising: throughput beside the bare `tokenizers` library, memory, and the time to the first batch.

    python benchmarks/tokenizing.py --megabytes 10 100 1000 --out benchmarks/results/tokenizing_2cores.json

The text is the packaged speeches, repeated with a running number in each paragraph. The byte-level BPE is trained once
on them, so that the rates are of tokenising alone. The bare library encodes the same lines in one process with its own
threads, from memory, and does nothing with the ids. The rates by processor time hold on a busy machine too; ours have
the reading, the digests and the start of the workers in them. Memory is the largest sum of the resident sets of the
process and its workers, sampled every 50 ms; "first batch" is the time from the call to the first batch of an untouched
cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

VOCABULARY = 16_000
OURS = """
import json, resource, sys, time
import workbench as wb
def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
text, tokenizer, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = wb.data.corpus(text, tokenizer_file=tokenizer)
model = wb.models.opt(vocab_size=data.vocab_size)
experiment = wb.Experiment(model=model, data=data, steps=1, global_batch=8, seq_len=128)
called, used = time.perf_counter(), cpu()
prepared = wb.tokenize(experiment, workers=workers, progress=False)
used = cpu() - used
batch = data.dataset(experiment).__getitems__(range(8))
first_batch_s = time.perf_counter() - called
found = {"seconds": prepared.seconds, "tokens": prepared.tokens, "cpu_s": used}
print(json.dumps({**found, "first_batch_s": first_batch_s}))
"""
BARE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
lines, busy, used = [], 0.0, 0.0
def encode():
    global busy, used
    started, cpu = time.perf_counter(), time.process_time()
    tokenizer.encode_batch_fast(lines, add_special_tokens=False)
    busy, used = busy + time.perf_counter() - started, used + time.process_time() - cpu
for line in open(sys.argv[1], encoding="utf-8"):
    lines.append(line)
    if len(lines) == 4000:
        encode()
        lines = []
encode()
print(json.dumps({"seconds": busy, "cpu_s": used}))
"""


def write_text(path: Path, megabytes: int) -> None:
    """Write the speeches as often as fill the size, each paragraph with a running number."""
    from workbench.data._text import packaged_speeches

    speeches = [speech.read_text().split("\n") for speech in packaged_speeches().paths]
    number = size = 0
    with path.open("w", encoding="utf-8") as file:
        while True:
            for speech in speeches:
                for line in filter(str.strip, speech):
                    number += 1
                    size += len(written := f"{number} {line.strip()}\n".encode())
                    file.write(written.decode())
                file.write("\n")
                if size >= megabytes * 1_000_000:
                    return


def measured(code: str, *arguments: object, **environment: str) -> tuple[dict[str, Any], float]:
    """Run a program, and return what it printed as JSON and the largest memory of its processes in MB."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        peak, root = 0, psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, memory(root))
            time.sleep(0.05)
        assert process.stdout is not None
        if process.returncode:
            raise SystemExit("The measured program failed; its error is above.")
        return json.loads(process.stdout.read()), peak / 1e6


def memory(root: psutil.Process) -> int:
    """Return the sum of the resident sets of a process and its descendants in bytes."""
    total = 0
    try:
        for process in (root, *root.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def row(text: Path, tokenizer: Path, workers: int, home: Path) -> dict[str, Any]:
    """Measure one text with one number of workers, and the bare library with as many threads."""
    shutil.rmtree(home, ignore_errors=True)
    megabytes = text.stat().st_size / 1e6
    bare, _ = measured(BARE, text, tokenizer, RAYON_NUM_THREADS=str(workers), TOKENIZERS_PARALLELISM="true")
    ours, peak = measured(OURS, text, tokenizer, workers, WORKBENCH_HOME=str(home))
    rate, bare_rate = megabytes / ours["seconds"], megabytes / bare["seconds"]
    return {
        "megabytes": round(megabytes),
        "workers": workers,
        "mb_per_s": round(rate, 2),
        "mb_per_s_per_worker": round(rate / workers, 2),
        "bare_mb_per_s": round(bare_rate, 2),
        "share_of_bare": round(rate / bare_rate, 3),
        "mb_per_cpu_s": round(megabytes / ours["cpu_s"], 2),
        "bare_mb_per_cpu_s": round(megabytes / bare["cpu_s"], 2),
        "share_of_bare_cpu": round(bare["cpu_s"] / ours["cpu_s"], 3),
        "peak_mb": round(peak),
        "first_batch_s": round(ours["first_batch_s"], 1),
        "tokens": ours["tokens"],
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from workbench.data._text import packaged_speeches
    from workbench.data._vocabulary import train_byte_level_bpe

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer.json")
        sample = [path.read_text() for path in packaged_speeches().paths]
        train_byte_level_bpe(sample, VOCABULARY, lambda _: None).save(str(tokenizer))
        for megabytes in options.megabytes:
            text = Path(folder, f"{megabytes}.txt")
            write_text(text, megabytes)
            for workers in dict.fromkeys(options.workers):
                rows.append(row(text, tokenizer, workers, Path(folder, "home")))
                print(json.dumps(rows[-1]), flush=True)
            text.unlink()
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    if options.out is not None:
        options.out.write_text(json.dumps({**machine, "vocabulary": VOCABULARY, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
