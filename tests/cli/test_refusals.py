"""Every error gives one sentence, an exit code, and no traceback of bigbatch."""

import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .command import BIGBATCH, environment, run, run_fresh, run_here, write_task


def assert_refused(done: subprocess.CompletedProcess[str], *texts: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for text in texts:
        assert text in " ".join(done.stderr.split()), done.stderr


BAD_TASKS = {
    "no loss": ("import torch\ndef model(): ...\ndef batches(batch_size): ...\n", "defines no loss()", "def loss("),
    "loss is a number": (
        "import torch\nloss = 3\ndef model(): ...\ndef batches(batch_size): ...\n",
        "loss of task is a int, not a function",
        "def loss(",
    ),
    "no framework": ("def model(): ...\n", "imports none of torch, tensorflow, keras, jax", "import torch"),
    "a model that is none": (
        "import torch\ndef model(): return 'me'\ndef batches(): return [torch.ones(4)]\ndef loss(m, b): ...\n",
        "model() of task returned a str: return a torch Module",
    ),
    "no batches": (
        "import torch\ndef model(): return torch.nn.Linear(1, 1)\ndef batches(): return []\ndef loss(m, b): ...\n",
        "gave 0 batches in epoch 1",
    ),
    "batches that are none": (
        "import torch\ndef model(): return torch.nn.Linear(1, 1)\ndef batches(): return 3\ndef loss(m, b): ...\n",
        "batches() of task returned a int",
    ),
    "defaults that train does not know": (
        "import torch\ndefaults = {'batchsize': 3}\ndef model(): ...\ndef batches(): ...\ndef loss(m, b): ...\n",
        "has the unknown option 'batchsize'",
    ),
    "a schedule without an end": (
        "import torch\ndefaults = {'schedule': 'cosine'}\ndef model(): return torch.nn.Linear(1, 1)\n"
        "def batches(batch_size):\n    yield torch.ones(4, 1)\ndef loss(m, b): return m(b).mean()\n",
        "needs to know the number of steps",
        "pass --steps",
    ),
}


@pytest.mark.parametrize("name", BAD_TASKS)
def test_bad_tasks(name: str, tmp_path: Path) -> None:
    code, *texts = BAD_TASKS[name]
    task = tmp_path / "task.py"
    task.write_text(code)
    assert_refused(run("train", task, "--out", tmp_path / "run"), *texts)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_missing_tasks(tmp_path: Path) -> None:
    assert_refused(run_here("train", "no-such-task"), "there is no task no-such-task", "digits, digits-batchnorm, text")
    (tmp_path / "task.txt").write_text("")
    assert_refused(run_here("train", tmp_path / "task.txt"), "is not a Python file")
    assert_refused(
        run_here("train", write_task(tmp_path), "--framework", "keras"), "imports torch but --framework is keras"
    )
    assert_refused(run_here("train", "digits", "--framework", "caffe"), "there is no digits for caffe")


OWN = {
    "when it is read": ("1 +\n", "SyntaxError"),
    "when it is run": ("import no_such_module\n", "No module named 'no_such_module'"),
    "in model()": ("\ndef model():\n    raise ValueError('my own mistake')\n", "my own mistake"),
    "in loss()": ("\ndef loss(model, batch):\n    return unknown_name\n", "unknown_name"),
    "in batches()": ("\ndef batches():\n    yield batches_go_wrong\n", "batches_go_wrong"),
    "in evaluate()": ("\ndef evaluate(model):\n    return {}['nothing']\n", "KeyError: 'nothing'"),
}


@pytest.mark.parametrize("place", OWN)
def test_error_of_the_task_is_shown_with_its_traceback(place: str, tmp_path: Path) -> None:
    code, text = OWN[place]
    done = run("train", write_task(tmp_path, code), "--out", tmp_path / "run", "--no-compare")
    assert done.returncode == 3, done.stderr
    assert text in done.stderr
    assert "tiny.py" in done.stderr
    assert "bigbatch/cli" not in done.stderr
    assert "bigbatch/torch" not in done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists() == (place == "in evaluate()")


BAD_NUMBERS: dict[str, tuple[list[Any], str]] = {
    "no batch": (["--batch-size", 0], "--batch-size"),
    "a micro-batch larger than the batch": (
        ["--batch-size", 8, "--micro-batch-size", 12],
        "is larger than --batch-size 8",
    ),
    "auto": (["--micro-batch-size", "auto"], "--micro-batch-size"),
    "half": (["--micro-batch-size", "2.5"], "--micro-batch-size"),
    "no rate": (["--lr", "nan"], "--lr must be a number above zero, not nan"),
    "a negative rate": (["--lr", "-1"], "--lr must be a number above zero"),
    "no clipping": (["--clip-norm", 0], "--clip-norm must be a number above zero"),
    "epochs and steps": (["--epochs", 2, "--steps", 3], "--epochs 2 and --steps 3 are both given"),
    "no base": (["--lr-scaling", "linear"], "needs --base-batch-size"),
    "an unknown schedule": (
        ["--schedule", "sawtooth"],
        '--schedule=\'sawtooth\' is unknown: pass "constant", "cosine" or "linear"',
    ),
    "an unknown precision": (
        ["--precision", "int3"],
        '--precision=\'int3\' is unknown: pass "float32", "bf16" or "fp16"',
    ),
    "checkpoints never": (["--checkpoint-every", 0], "--checkpoint-every 0: cannot read '0' as an interval"),
    "an unknown unit": (
        ["--checkpoint-every", "3weeks"],
        "cannot read '3weeks' as an interval: pass steps (100) or a time (10min)",
    ),
    "an unknown way": (
        ["--on-nonfinite", "pray"],
        '--on-nonfinite=\'pray\' is unknown: pass "skip", "raise" or "stop"',
    ),
    "a negative seed": (["--seed", -1], "--seed must be a whole number, 0 or greater, not -1"),
    "an unknown option": (["--bach-size", 3], "No such option"),
    "a word for a number": (["--epochs", "many"], "--epochs"),
    "resume and out": (["--resume", "somewhere"], "leave out --out and --config"),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_bad_numbers(name: str, tmp_path: Path) -> None:
    arguments, text = BAD_NUMBERS[name]
    assert_refused(run_here("train", write_task(tmp_path), "--out", tmp_path / "run", *arguments), text)
    assert not (tmp_path / "run").exists()


def test_missing_device(tmp_path: Path) -> None:
    done = run("train", write_task(tmp_path), "--out", tmp_path / "run", "--device", "abacus")
    assert_refused(done, "--device abacus cannot be used here")
    assert not (tmp_path / "run" / "history.jsonl").exists()


def test_a_device_for_a_keras_task(tmp_path: Path) -> None:
    done = run("train", "digits", "--framework", "keras", "--out", tmp_path / "run", "--device", "cuda")
    assert_refused(done, "--device cuda does not work for Keras tasks, which use the device of their backend")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("batch_size = ", "is not a TOML file"),
        ("bach_size = 3", "has the unknown option 'bach_size'"),
        ('lr = "big"', "--lr must be"),
        ("checkpoint_every = 1.5", "cannot read 1.5 as an interval"),
    ],
)
def test_bad_config_files(text: str, told: str, tmp_path: Path) -> None:
    config = tmp_path / "options.toml"
    config.write_text(text)
    assert_refused(run_here("train", write_task(tmp_path), "--config", config), told)


def test_missing_config_file(tmp_path: Path) -> None:
    assert_refused(run_here("train", write_task(tmp_path), "--config", tmp_path / "no.toml"), "cannot read", "no.toml")


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert_refused(run("train", write_task(tmp_path), "--out", file / "run"), "File exists", "--out", code=4)
    assert file.read_text() == "mine"


def test_full_disk(tmp_path: Path) -> None:
    def little_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    done = run_fresh("train", write_task(tmp_path), "--out", tmp_path / "run", preexec_fn=little_space)
    assert_refused(done, "File too large", code=4)
    assert not list((tmp_path / "run").glob("*.part"))
    assert not (tmp_path / "run" / "summary.json").exists()


def test_resuming_a_folder_without_a_run(tmp_path: Path) -> None:
    assert_refused(
        run_here("train", write_task(tmp_path), "--resume", tmp_path),
        "cannot read",
        "config.toml",
        "--resume the folder",
    )


@pytest.mark.parametrize("arguments", [["doctor"], ["--help"], ["train", "--help"]], ids=" ".join)
def test_a_closed_pipe(arguments: list[str]) -> None:
    process = subprocess.Popen(
        [str(BIGBATCH), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) in (0, 1, 141)
    assert "Traceback" not in told
    assert "Exception ignored" not in told
