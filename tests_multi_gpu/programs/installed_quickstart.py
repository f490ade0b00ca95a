"""Uses the installed package as a new user does: the quickstart of the README, which is the package's description, and
a few steps of the training program. ``make test-wheel`` starts it with ``-I`` in an environment that holds only the
wheel and its requirements; the working directory is a temporary folder, so that no file of a checkout is imported."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

TEXT = "Each rank reads its shard of the weight, computes the logits of a chunk and adds up the gradient.\n"
STEPS = 4


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ("liger_dist", "liger_dist_kernels", "liger_dist_train"):
            check_place(name)
        version = metadata.version("liger_dist")
        expect(command("--version").strip(), f"liger_dist {version}", "liger-dist --version")
        run_quickstart(metadata.metadata("liger_dist").get_payload())
        train(Path(folder))
    print(f"liger_dist {version}: the installed wheel runs the quickstart and the training program")


def expect(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        sys.exit(f"{what} is {found!r}; expected {expected!r}")


def check_place(name: str) -> None:
    """Exits if a package is imported from another place than this environment's site-packages."""
    module = __import__(name)
    expect(Path(module.__file__ or "").parent.parent, Path(sysconfig.get_path("purelib")), f"the folder of {name}")


def run_quickstart(description: Any) -> None:
    """Runs the first block of Python code of the README on one rank, and compares the loss with the unwrapped model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    block = re.search(r"^```python\n(.*?)^```$", str(description), re.MULTILINE | re.DOTALL)
    if block is None:
        sys.exit("the description of the package has no block of Python code; expected the README")
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(one_rank)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes)).to(device)
    ids = torch.randint(1000, (2, 32), device=device)
    expected = float(model(input_ids=ids, labels=ids).loss.detach())
    names: dict[str, Any] = {"model": model, "ids": ids, "labels": ids}
    exec(block[1], names)
    torch.distributed.destroy_process_group()
    for name in one_rank:
        del os.environ[name]
    if not math.isclose(float(names["loss"].detach()), expected, rel_tol=1e-5):
        sys.exit(f"the README's loss is {float(names['loss'])}; expected {expected}, as of the unwrapped model")
    missing = [name for name, parameter in names["model"].named_parameters() if parameter.grad is None]
    expect(missing, [], "the list of parameters without a gradient after the README's backward")


def train(folder: Path) -> None:
    """Runs ``liger-dist train`` on a small text with a tokenizer of characters, and reads its metrics."""
    make_tokenizer(folder / "tokenizer")
    (folder / "notes.txt").write_text(TEXT * 60)
    options = {
        "model": "tiny",
        "data": "notes.txt",
        "tokenizer": "tokenizer",
        "sequence_length": 64,
        "batch_size": 2,
        "steps": STEPS,
        "num_proc": 1,
        "output_dir": "run",
    }
    command("train", *(word for name, value in options.items() for word in (f"--{name}", str(value))))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    expect(len(losses), STEPS, "the number of steps in metrics.jsonl")
    if not losses[-1] < losses[0]:
        sys.exit(f"the losses of {STEPS} steps on one repeated sentence are {losses}; expected the last to be smaller")


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0} | {character: code for code, character in enumerate(sorted(set(TEXT)), 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)


def command(*arguments: str) -> str:
    """Runs the installed command ``liger-dist``; returns what it printed."""
    program = shutil.which("liger-dist", path=sysconfig.get_path("scripts"))
    if program is None:
        sys.exit(f"there is no command liger-dist in {sysconfig.get_path('scripts')}; expected the wheel's entry point")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    finished = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)
    if finished.returncode != 0:
        line, errors = " ".join(arguments), finished.stderr[-3000:]
        sys.exit(f"liger-dist {line} ended with status {finished.returncode}; expected 0. Its last words:\n{errors}")
    return finished.stdout


if __name__ == "__main__":
    main()
