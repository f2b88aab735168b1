"""Compare the predicted throughput of streamed text with the measured one.

    python benchmarks/data_supply.py --rounds 5 --out FILE

Each round restricts a process to some cores, predicts their tokens per second as `wb.planning.data_supply` does, from
excerpts, and then measures them while the whole text passes through the processes and the file that training reads,
from the end of the first chunk on. `measured_by_clock` holds on a quiet machine. `measured_by_cpu` is the number of
tokens over the processor time of the feeding processes, times the cores, which is the same on a quiet machine and holds
on a busy one.
The text is the packaged speeches, or that of `--text`, repeated with a running number in each paragraph.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import options
from tokenizing import VOCABULARY, written_text

ROUND = """
import json, os, sys, time
import psutil
import workbench as wb
from workbench.data.streaming import Feeder, new_ring_file, ring_for
cores = int(sys.argv[3])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
data = wb.data.corpus(sys.argv[1], tokenizer=sys.argv[2], streaming=True, shuffle_buffer=1024)
model = wb.models.opt(vocab_size=data.vocab_size)
experiment = wb.Experiment(model=model, data=data, steps=1, global_batch=8, seq_len=128)
prepared = wb.runs.tokenize(experiment, progress=False)
dataset = data.reads(experiment.replace(steps=prepared.tokens // 128 // 8)).dataset()
descriptor, path = new_ring_file()
path.unlink()
ring = ring_for(dataset.stream, descriptor, 8, 1, dataset.vocabulary)
ring.clear(0)
feeder = Feeder(dataset.stream, ring, 0, None)
samples = dataset.reading(ring)
def used():
    root = psutil.Process(feeder._child.process.pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return time.perf_counter(), sum(one.user + one.system for one in times)
first, last = 1024, len(samples) // 1024 * 1024
for index in range(0, last, 64):
    if index == first:
        begun = used()
    samples.__getitems__(range(index, index + 64))
    ring.release(0, index + 64)
ended = used()
feeder.close()
tokens = (last - first) * 128
print(json.dumps({
    "predicted": cores * prepared.tokens_per_core_s,
    "measured_by_clock": tokens / (ended[0] - begun[0]),
    "measured_by_cpu": cores * tokens / max(0.01, ended[1] - begun[1]),  # 10 ms is a tick of that clock
}))
"""


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--text", type=Path, help="folder of .txt files; the packaged speeches by default")
    asked = options.parsed(parser)
    vocabulary = VOCABULARY
    if asked.tiny:
        asked.megabytes, asked.cores, asked.rounds, vocabulary = 1, [1], 1, 300
    from workbench.data.text import packaged_speeches
    from workbench.data.tokenizer import train_byte_level_bpe

    paths = sorted(asked.text.glob("*.txt")) if asked.text else packaged_speeches().paths
    documents = [path.read_text() for path in paths]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer.json")
        train_byte_level_bpe(documents, vocabulary, lambda _: None).save(str(tokenizer))
        text = written_text(Path(folder, "text.txt"), documents, asked.megabytes)
        for number in range(asked.rounds):
            for cores in asked.cores:
                command = [sys.executable, "-c", ROUND, str(text), str(tokenizer), str(cores)]
                environment = {**os.environ, "WORKBENCH_HOME": str(Path(folder, f"home-{number}-{cores}"))}
                found = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
                ratios = {f"ratio_{by}": found["predicted"] / found[f"measured_{by}"] for by in ("by_clock", "by_cpu")}
                rows.append({"cores": cores, **found, **ratios, "load_average": os.getloadavg()[0]})
                print(json.dumps(rows[-1]), flush=True)
    medians = {
        cores: {
            by: round(statistics.median(row[f"ratio_{by}"] for row in rows if row["cores"] == cores), 3)
            for by in ("by_clock", "by_cpu")
        }
        for cores in asked.cores
    }
    print(f"predicted / measured, median: {medians}")
    if asked.out is not None:
        facts = {"megabytes": asked.megabytes, "vocabulary": vocabulary, "predicted_over_measured": medians}
        asked.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
