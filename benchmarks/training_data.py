"""The data path of ``liger-dist train`` with 200,000 synthetic documents: tokens a second and memory of tokenising,
what a killed run does again, and how soon a stream's first step ends. Every count is compared with one made without it.

    python -m benchmarks.training_data --processes 2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
VOCABULARY = 60_000


def write_corpus(file: Path, documents: int) -> None:
    """Words by Zipf's law, about 300 in a document."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    lengths = rng.integers(2, 10, VOCABULARY)
    words = np.array(["".join(rng.choice(letters, int(length))) for length in lengths], dtype=object)
    shares = 1 / np.arange(1, VOCABULARY + 1)
    shares /= shares.sum()
    with file.open("w") as stream:
        for _ in range(documents // 1000):
            sizes = np.clip(rng.lognormal(5.55, 0.6, 1000), 5, 4000).astype(int)
            drawn, start = rng.choice(VOCABULARY, sizes.sum(), p=shares), 0
            for size in sizes:
                stream.write(json.dumps({"text": " ".join(words[drawn[start : start + size]])}) + "\n")
                start += size


class Memory:
    """Largest resident set of each process whose command holds ``word``, looked at every half second."""

    def __init__(self, word: str) -> None:
        self._word, self.peaks = word.encode(), dict[int, float]()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    parent = self._word in (process / "cmdline").read_bytes()
                    spawned = b"multiprocessing" in (process / "cmdline").read_bytes()
                    lines = (process / "status").read_text().splitlines() if parent or spawned else []
                except OSError:
                    continue
                for line in lines:
                    if line.startswith("VmHWM"):
                        self.peaks[int(process.name)] = int(line.split()[1]) / 2**20
            time.sleep(0.5)


def count(file: Path, tokenizer: Path) -> tuple[int, int]:
    """Documents and tokens, by the tokenizer alone."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    documents = tokens = 0
    with file.open() as stream:
        while lines := [line for _, line in zip(range(1000), stream, strict=False)]:
            ids = loaded([json.loads(line)["text"] for line in lines], add_special_tokens=False)["input_ids"]
            documents, tokens = documents + len(ids), tokens + sum(len(row) + 1 for row in ids)
    return documents, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options.documents, options.processes)


def command_for(folder: Path, file: Path, tokenizer: Path, processes: int, **changes: Any) -> list[str]:
    """One step of training."""
    settings: dict[str, Any] = {"data": file, "tokenizer": tokenizer, "sequence_length": 512, "batch_size": 1}
    settings |= {"steps": 1, "checkpoint_every": 0, "eval_batches": 1, "num_proc": processes}
    settings |= {"output_dir": folder / "run"} | changes
    pairs = [[f"--{key}", str(value)] for key, value in settings.items()]
    return [sys.executable, "-m", "liger_dist_train", *[word for pair in pairs for word in pair]]


def measure(folder: Path, documents: int, processes: int) -> None:
    """Prints one line for each figure."""
    file, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    write_corpus(file, documents)
    head = folder / "head.jsonl"
    with file.open() as stream:
        head.write_text("".join(line for _, line in zip(range(8000), stream, strict=False)))
    make = [sys.executable, "-m", "liger_dist_train", "tokenizer", str(tokenizer), str(head)]
    subprocess.run([*make, "--vocab_size", "8000"], check=True)
    expected = count(file, tokenizer)
    print(f"independent count: {expected[0]} documents, {expected[1]} tokens")

    def command(**changes: Any) -> list[str]:
        return command_for(folder, file, tokenizer, processes, **changes)

    memory = Memory(str(folder))
    began = time.perf_counter()
    cache = folder / "cache"
    with subprocess.Popen(command(cache_dir=cache), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        while not list(cache.glob("tokens-*/*.arrow")):
            time.sleep(0.05)
        first = time.perf_counter()
        while len(list(cache.glob("tokens-*/*.arrow"))) < 64:
            time.sleep(0.05)
        tokenised = time.perf_counter()
        run.wait()
    (source,) = json.loads((folder / "run" / "data.json").read_text())["sources"]
    assert (source["documents_read"], source["tokens"]) == expected, source
    print(f"data.json: {source['documents_read']} documents, {source['tokens']} tokens, as counted")
    print(f"tokenised in {tokenised - began:.1f} s from the start on, {first - began:.1f} s to the first shard")
    print(f"{source['tokens'] / (tokenised - began):.3g} tokens/s, start included, with {processes} processes")
    print(f"largest resident sets, GiB: {sorted((round(peak, 2) for peak in memory.peaks.values()), reverse=True)[:4]}")
    efficiency = source["splits"]["train"]["packed_efficiency"]
    print(f"packed efficiency at 512 tokens: {efficiency}")

    measure_again(folder, command, source)


def measure_again(folder: Path, command: Any, source: dict[str, Any]) -> None:
    """A run that is killed in the middle and started again, and a stream."""
    killed = folder / "killed"
    with subprocess.Popen(command(cache_dir=killed), stderr=subprocess.DEVNULL, start_new_session=True) as run:
        while len(list(killed.glob("tokens-*/*.arrow"))) < 32:
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
    begun = len(list(killed.glob("tokens-*/*.partial")))
    kept = {path: path.stat().st_mtime_ns for path in killed.glob("tokens-*/*.arrow")}
    subprocess.run(command(cache_dir=killed, output_dir=folder / "again"), check=True, capture_output=True)
    assert all(path.stat().st_mtime_ns == was for path, was in kept.items())
    total = len(list(killed.glob("tokens-*/*.arrow")))
    (again,) = json.loads((folder / "again" / "data.json").read_text())["sources"]
    assert again == source
    print(f"killed after {len(kept)} of {total} shards: {begun} were begun and are done again ({begun / total:.1%})")

    shutil.rmtree(folder / "run")
    streamed = command(cache_dir=folder / "stream", streaming=True)
    began = time.perf_counter()
    with subprocess.Popen(streamed, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        metrics = folder / "run" / "metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text().count("\n")):
            time.sleep(0.05)
        took = time.perf_counter() - began
        run.wait()
    written = sum(path.stat().st_size for path in (folder / "stream").rglob("*") if path.is_file())
    print(f"streaming: the first step ended {took:.1f} s after the start; {written} bytes in the cache")


if __name__ == "__main__":
    main()
