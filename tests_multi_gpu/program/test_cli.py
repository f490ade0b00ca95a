"""liger-dist and its commands explain, verify and doctor, as a user starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Workers

import liger_dist
from liger_dist.cli import main
from liger_dist_train import command

SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig


def make_model():
    torch.manual_seed(0)
    settings = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=101, num_key_value_heads=1, **settings))


def make_wrapped():
    import liger_dist
    return liger_dist.wrap(make_model())


def make_batch():
    ids = torch.arange(12)[None]
    return {"input_ids": ids, "labels": ids.clone()}


def make_broken():
    model = make_wrapped()
    model.lm_head.weight.register_hook(lambda gradient: gradient + 1.0 / (1.0 + float(gradient.norm())))
    return model


NOT_A_MODEL = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_training.py"
    path.write_text(SCRIPT)
    return path


def listed_commands() -> list[str]:
    """Commands in the help of ``liger-dist``."""
    return re.findall(r"^  ([a-z]+)  ", command.HELP, re.MULTILINE)


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"liger_dist {liger_dist.__version__}\n"


def test_version_option_and_unknown_command_do_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from liger_dist_train.command import main\n"
        "statuses = main(['--version']), main(['trian'])\n"
        "print(statuses, [name for name in ('torch', 'liger_dist') if name in sys.modules])\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "(0, 2) []"


@pytest.mark.parametrize("given", ["trian", "run.yaml", "--steps"])
def test_unknown_command_lists_all_commands(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(listed_commands()) == 11
    assert command.main([given, "--help"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"liger-dist: {given!r} is no command; expected one of ")
    assert set(listed_commands()) <= set(re.findall(r"[a-z]+", printed.err))


@pytest.mark.parametrize("name", listed_commands())
def test_every_listed_command_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = command.main([name, "--help"])
    except SystemExit as end:  # argparse's
        status = int(end.code or 0)
    assert status == 0
    assert capsys.readouterr().out.startswith(f"usage: liger-dist {name}")


@pytest.mark.smoke
def test_explain(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{script}:make_model", "--strategy", "none"]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["weight_shape"] == "(101, 16)"
    assert printed["adapter"] == "replicated"


@pytest.mark.smoke
def test_verify(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{script}:make_model"]) == 0
    assert "verdict          ok" in capsys.readouterr().out
    assert main(["verify", f"{script}:make_wrapped", "--batch", f"{script}:make_batch"]) == 0
    assert "verdict          ok" in capsys.readouterr().out
    assert main(["verify", f"{script}:make_broken"]) == 1
    assert "twice the loss does not give twice lm_head's gradient" in capsys.readouterr().out


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["make_model"], "names no function"),
        (["no_such_file.py:make_model"], "there is no file no_such_file.py"),
        (["no_such_module:make_model"], "cannot be imported"),
        (["SCRIPT:make_nothing"], "has no function 'make_nothing'"),
        (["SCRIPT:NOT_A_MODEL"], "has no function 'NOT_A_MODEL'"),
        (["SCRIPT:make_batch"], "returned a dict; expected a model"),
        (["SCRIPT:make_wrapped", "--strategy", "none"], "wrapped already"),
        (["SCRIPT:make_model", "--strategy", "fsdp2"], "needs a process group"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], words: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, *rest = arguments
    assert main(["explain", spec.replace("SCRIPT", str(script)), *rest]) == 2
    message = capsys.readouterr().err
    assert message.startswith("liger-dist: ")
    assert words in message


@pytest.mark.nightly
def test_two_processes(script: Path) -> None:
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "liger_dist", "verify", "my_training.py:make_model", "--strategy", "fsdp2", "--mesh", "1,2"),
        ],
        cwd=script.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("verdict          ok") == 1
    assert "UserWarning" not in finished.stderr, finished.stderr


@pytest.mark.smoke
def test_the_doctor_finds_nothing_wrong_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for what in ("python", "torch", "transformers", "deepspeed", "GPU", "kernels", "host name", "open files"):
        assert f" {what}" in printed
    assert printed.endswith("nothing is wrong\n")


@pytest.mark.smoke
def test_the_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_dist import doctor

    own = doctor.linear_cross_entropy
    monkeypatch.setattr(doctor, "NEEDED", {"torch": "99.0", "no-such-package": "1.0"})
    monkeypatch.setattr(doctor, "linear_cross_entropy", lambda hidden, *rest: own(hidden * 1.1, *rest))
    monkeypatch.setattr(doctor, "LEAST_OPEN_FILES", 2**62)
    diagnosis = doctor.diagnose()
    assert not diagnosis.ok
    text = str(diagnosis)
    for words in (
        "pip install 'torch>=99.0'",
        "pip install 'no-such-package>=1.0'",
        "computes wrong numbers",
        "ulimit -n",
        "3 wrong",
    ):
        assert words in text
    assert [finding.what for finding in diagnosis.findings if finding.verdict == "wrong"] == [
        "torch",
        "no-such-package",
        "kernels",
    ]


@pytest.mark.smoke
def test_the_doctor_knows_which_triton_linear_attention_refuses() -> None:
    from liger_dist.doctor import of_linear_attention

    verdicts = {
        version: of_linear_attention(version).verdict for version in ("3.3.1", "3.4.0", "3.7.0", "3.7.1", "3.9.0")
    }
    assert [version for version, verdict in verdicts.items() if verdict == "wrong"] == ["3.4.0", "3.7.0"]
    assert "triton>=3.7.1" in of_linear_attention("3.6.0").remedy


def test_the_doctor_under_torchrun(workers_2: Workers) -> None:
    for text, ok in workers_2.run(diagnosed):
        assert ok
        assert "right over 2 processes" in text


@pytest.mark.smoke
def test_the_doctor_hears_of_every_process(workers_2: Workers) -> None:
    """Wrong sums and few open files of one of them alone."""
    for rank, (text, ok) in enumerate(workers_2.run(diagnosed_with_a_broken_link)):
        assert not ok
        where = "" if rank == 1 else ", rank 1 on "
        assert f"! all-reduce{where}" in text
        assert f"- open files{where}" in text
        assert "wrong sums over 2 processes" in text


def diagnosed_with_a_broken_link() -> tuple[str, bool]:
    from unittest import mock

    from liger_dist import doctor

    own, broken = dist.all_reduce, dist.get_rank() == 1

    def reduce(tensor: torch.Tensor) -> None:
        own(tensor)
        tensor.add_(1 if broken else 0)

    least = 2**62 if broken else doctor.LEAST_OPEN_FILES
    with mock.patch.object(dist, "all_reduce", reduce), mock.patch.object(doctor, "LEAST_OPEN_FILES", least):
        return diagnosed()


def diagnosed() -> tuple[str, bool]:
    from liger_dist.doctor import diagnose

    diagnosis = diagnose()
    return str(diagnosis), diagnosis.ok


NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *driver_version*) echo 580.1 ;;
  *power.limit*)
    echo "0, 500.00, 700.00, 1980, 1980, Not Active, Not Active"
    echo "1, 700.00, 700.00, 1200, 1980, Active, Not Active"
    echo "2, 700.00, 700.00, [N/A], 1980, Not Active, Active" ;;
esac
"""


@pytest.mark.smoke
@pytest.mark.parametrize(("loaded", "verdict"), [(91002, "note"), (91501, "ok"), (91600, "ok")])
def test_the_doctor_sees_an_older_cudnn(monkeypatch: pytest.MonkeyPatch, loaded: int, verdict: str) -> None:
    from liger_dist import doctor

    own = metadata.version
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: loaded)
    monkeypatch.setattr(metadata, "version", lambda name: "9.15.1.9" if name == "nvidia-cudnn-cu13" else own(name))
    (finding,) = doctor.cudnn()
    assert finding.verdict == verdict
