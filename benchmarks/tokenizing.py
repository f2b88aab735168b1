"""Measure tokenising: throughput beside the bare `tokenizers` library, memory, and the time to the first batch.

    python benchmarks/tokenizing.py --megabytes 10 100 1000 --rounds 5 3 1 --out FILE

The text is the packaged speeches, or that of `--text`, repeated with a running number in each paragraph. The byte-
level BPE is trained once on it, so that the rates are of tokenising alone. Every text is measured in three ways in
turn, for so many rounds, of which a row has the medians: the bare library, which encodes up to 100 MB of the same
lines from memory and does nothing with the ids; tokenising once into the cache; and one epoch of the streamed text,
read by one reader. The bare library runs in one process with its own threads and batches of 4,000 lines, and in a
process for each core with batches of 200; shares are of the faster one. Ours have the reading, the digests and the
start of the processes in them, and a stream by processor time also what its workers do ahead of its end. The rates by
processor time hold on a busy machine too. Memory is the largest sum of the resident sets of the process and its
workers, sampled every 50 ms. "First batch" is the time from the call to the first batch with an untouched cache.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import options
import psutil

VOCABULARY = 16_000
BARE_BYTES = 100_000_000
"""Part of a text that the bare library encodes; the text repeats itself, so that its rate stays the same."""
PREPARED = """
import json, os, resource, sys, time
import psutil
import workbench as wb
from workbench.data.streaming import Feeder, new_ring_file, ring_for
def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
text, tokenizer, workers, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:workers])
data = wb.data.corpus(text, tokenizer=tokenizer, streaming=tokens > 0)
model = wb.models.opt(vocab_size=data.vocab_size)
steps = max(1, tokens // 128 // 8)
experiment = wb.Experiment(model=model, data=data, steps=steps, global_batch=8, seq_len=128)
called, used = time.perf_counter(), cpu()
"""
STORED = f"""{PREPARED}
prepared = wb.runs.tokenize(experiment, workers=workers, progress=False)
used = cpu() - used
batch = data.reads(experiment).dataset().__getitems__(range(8))
first_batch_s = time.perf_counter() - called
found = {{"seconds": prepared.seconds, "tokens": prepared.tokens, "cpu_s": used}}
print(json.dumps({{**found, "first_batch_s": first_batch_s}}))
"""
STREAMED = f"""{PREPARED}
dataset = data.reads(experiment).dataset()
begun = time.perf_counter()
ring = ring_for(dataset.stream, new_ring_file()[0], 8, 1, dataset.vocabulary)
ring.clear(0)
feeder = Feeder(dataset.stream, ring, 0, None)
samples = dataset.reading(ring)
batch = samples.__getitems__(range(8))
first_batch_s = time.perf_counter() - called
for step in range(1, steps):
    samples.__getitems__(range(8 * step, 8 * step + 8))
    ring.release(0, 8 * step)
seconds = time.perf_counter() - begun
children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
used = cpu() - used + sum(times.user + times.system for times in children)
feeder.close()
print(json.dumps({{"seconds": seconds, "cpu_s": used, "first_batch_s": first_batch_s}}))
"""
BARE = """
import json, multiprocessing, os, sys, time
text, tokenizer, cores, size, processes, batch = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
def encode(share):
    from tokenizers import Tokenizer
    encoder = Tokenizer.from_file(tokenizer)
    lines, read, mine, busy, used = [], 0, 0, 0.0, 0.0
    with open(text, "rb") as file:
        for number, line in enumerate(file):
            read += len(line)
            if number // batch % processes == share:
                mine += len(line)
                lines.append(line.decode())
            if lines and (len(lines) == batch or read > size):
                started, cpu = time.perf_counter(), time.process_time()
                encoder.encode_batch_fast(lines, add_special_tokens=False)
                busy, used, lines = busy + time.perf_counter() - started, used + time.process_time() - cpu, []
            if read > size:
                break
    return busy, used, mine
with multiprocessing.get_context("fork").Pool(processes) as pool:
    busy, used, read = zip(*pool.map(encode, range(processes), chunksize=1))
print(json.dumps({"seconds": max(busy), "cpu_s": sum(used), "megabytes": sum(read) / 1e6}))
"""


def written_text(path: Path, documents: list[str], megabytes: int) -> Path:
    """Write the documents as often as fill the size, each paragraph with a running number, and return the file."""
    number = size = 0
    with path.open("w", encoding="utf-8") as file:
        while True:
            for document in documents:
                for line in filter(str.strip, document.split("\n")):
                    number += 1
                    size += len(written := f"{number} {line.strip()}\n".encode())
                    file.write(written.decode())
                file.write("\n")
                if size >= megabytes * 1_000_000:
                    return path


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


def round_of(text: Path, tokenizer: Path, workers: int, home: Path) -> dict[str, dict[str, float]]:
    """Measure the bare library, the cache and the stream once, on the same cores."""
    bare_rates: dict[str, float] = {}
    size = min(BARE_BYTES, text.stat().st_size - 1)  # the last lines are encoded when more has been read
    for name, processes, batch in (("threads", 1, 4000), ("processes", workers, 200)):
        threads = {
            "RAYON_NUM_THREADS": str(workers // processes),
            "TOKENIZERS_PARALLELISM": str(processes == 1).lower(),
        }
        bare, _ = measured(BARE, text, tokenizer, workers, size, processes, batch, **threads)
        bare_rates |= {f"bare_{name}_mb_per_{of}": bare["megabytes"] / bare[by] for of, by in BASES.items()}
    for of in BASES:
        bare_rates[f"bare_mb_per_{of}"] = max(rate for name, rate in bare_rates.items() if name.endswith(f"_per_{of}"))
    found: dict[str, dict[str, float]] = {}
    megabytes, tokens = text.stat().st_size / 1e6, 0
    for way, code in (("stored", STORED), ("streamed", STREAMED)):
        shutil.rmtree(home, ignore_errors=True)
        ours, peak = measured(code, text, tokenizer, workers, tokens, WORKBENCH_HOME=str(home))
        tokens = ours.get("tokens", tokens)
        rates = {f"mb_per_{of}": megabytes / ours[by] for of, by in BASES.items()}
        shares = {f"share_of_bare_{name}": rate / bare_rates[f"bare_{name}"] for name, rate in rates.items()}
        others = {"peak_mb": peak, "first_batch_s": ours["first_batch_s"], "tokens": tokens}
        found[way] = {**rates, **bare_rates, **shares, **others, "load_average": os.getloadavg()[0]}
    return found


BASES = {"s": "seconds", "cpu_s": "cpu_s"}
"""Time that rates are over: that of the clock, and that of the processors."""


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--workers", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--rounds", type=int, nargs="+", default=[3], help="of each size, or of all")
    parser.add_argument("--text", type=Path, help="folder of .txt files; the packaged speeches by default")
    asked = options.parsed(parser)
    vocabulary = VOCABULARY
    if asked.tiny:
        asked.megabytes, asked.workers, asked.rounds, vocabulary = [1], [1], [1], 300
    from workbench.data.text import packaged_speeches
    from workbench.data.tokenizer import train_byte_level_bpe

    paths = sorted(asked.text.glob("*.txt")) if asked.text else packaged_speeches().paths
    documents = [path.read_text() for path in paths]
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "vocabulary": vocabulary,
    }
    rounds_of = asked.rounds if len(asked.rounds) > 1 else asked.rounds * len(asked.megabytes)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer.json")
        train_byte_level_bpe(documents, vocabulary, lambda _: None).save(str(tokenizer))
        for megabytes, count in zip(asked.megabytes, rounds_of, strict=True):
            text = written_text(Path(folder, f"{megabytes}.txt"), documents, megabytes)
            for workers in asked.workers:
                rounds = [round_of(text, tokenizer, workers, Path(folder, "home")) for _ in range(count)]
                for way in ("stored", "streamed"):
                    values = {name: [one[way][name] for one in rounds] for name in rounds[0][way]}
                    medians = {name: round(statistics.median(value), 3) for name, value in values.items()}
                    shares = [round(share, 3) for share in values["share_of_bare_mb_per_s"]]
                    facts = {"way": way, "megabytes": megabytes, "workers": workers, "rounds": count}
                    rows.append({**facts, **medians, "share_of_bare_mb_per_s_of_each_round": shares})
                    print(json.dumps(rows[-1]), flush=True)
                if asked.out is not None:
                    asked.out.write_text(json.dumps({**machine, "rows": rows}, indent=2) + "\n")
            text.unlink()


if __name__ == "__main__":
    main()
