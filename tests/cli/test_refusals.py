"""Every error gives one sentence, an exit code, and no traceback of bigbatch."""

import re
import resource
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bigbatch import OptionError
from bigbatch.cli import doctor
from bigbatch.cli.engines.engine import scores_of
from bigbatch.cli.errors import TaskError
from bigbatch.cli.run.ranks import Launch, here
from bigbatch.cli.task import Task

from .command import BIGBATCH, environment, run, run_fresh, run_here, summary_of, train, write_task
from .runs import write_run


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
    "no rate": (["--lr", "nan"], "--lr must be a number above zero and up to 1.8e308, not nan"),
    "an infinite rate": (["--lr", "1e400"], "--lr must be a number above zero and up to 1.8e308, not inf"),
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
        ("out = 5", "--out must be text, not 5"),
        ('out = "a\\u0000b"', "has a NUL byte, which no file name can have"),
        ('quiet = "x"', "--quiet must be true or false, not 'x'"),
        ("json = 1", "--json must be true or false, not 1"),
        ("compare = 1", "--compare must be true or false, not 1"),
        ("task = []", "--task must be text, not []"),
        ("framework = [1]", "--framework must be text, not [1]"),
        ("device = 3", "--device must be text, not 3"),
        ("lr = {big}", "--lr must be a number above zero and up to 1.8e308, not 1000"),
        ("lr = 1e400", "--lr must be a number above zero and up to 1.8e308, not inf"),
        ("lr = {big}{big}{big}{big}{big}{big}{big}{big}{big}{big}{big}", "is not a TOML file: Exceeds the limit"),
        ('lr = 1e308\nlr_scaling = "linear"\nbase_batch_size = 1', "is inf for --batch-size 16: pass another --lr"),
        ("clip_norm = {big}", "--clip-norm must be a number above zero and up to 1.8e308, not 1000"),
        ("batch_size = {big}", "pass 9223372036854775807 or less"),
        ("steps = {big}", "pass 9223372036854775807 or less"),
        ("checkpoint_every = {big}", "as an interval"),
        ('checkpoint_every = "{big}h"', "as an interval"),
        ("lr = {deep}", "is not a TOML file: maximum recursion depth exceeded"),
        ("lr = 1 #{huge}", "has more than 1048576 bytes, which is no list of options: pass --config a TOML file"),
        ('"\\u001b[31m" = 3', "has the unknown option '\\x1b[31m'"),
    ],
)
def test_bad_config_files(text: str, told: str, tmp_path: Path) -> None:
    config = tmp_path / "options.toml"
    big = "1" + "0" * 400
    config.write_text(text.format(big=big, deep="[" * 3000 + "]" * 3000, huge="!" * 2**20))
    assert_refused(run_here("train", write_task(tmp_path), "--config", config), told)
    assert not (tmp_path / "runs").exists()


def test_names_that_cannot_be_stored(tmp_path: Path) -> None:
    """Of a task, of a folder that it is in, of a run folder: config.toml is UTF-8, and no file name has a NUL byte."""
    bad, told = "caf\udce9", "caf\\udce9' is not valid UTF-8: use another name"
    task, folder = write_task(tmp_path), tmp_path / bad
    folder.mkdir()
    assert_refused(run("train", write_task(folder), "--out", tmp_path / "run"), "the task", "is not valid UTF-8")
    assert_refused(run("verify", write_task(tmp_path, name=bad)), "the task", "is not valid UTF-8")
    assert_refused(run_here("train", task, "--out", folder), "--out", told)
    assert_refused(run_here("train", task, "--resume", folder), "--resume", told)
    assert_refused(run_here("train", task, "--config", folder), "--config", told)
    assert_refused(run_here("report", folder), "the run folder", told)
    assert_refused(run_here("report", tmp_path, "--out", folder), "--out", told)
    assert_refused(run_here("train", "a\0b"), "the task", "a\\x00b' has a NUL byte")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("num", "rank"),
    [("", None), ("two", "0"), ("2", None), (None, "1"), ("2", "2"), ("-2", "0"), ("2", "-1"), ("", "0")],
)
def test_ranks_that_torchrun_did_not_start(num: str | None, rank: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", num), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"WORLD_SIZE is {num!r} and RANK is {rank!r} in the environment"):
        here()
    if num == "two":
        assert_refused(run("train", "digits"), "WORLD_SIZE is 'two' and RANK is '0' in the environment")


@pytest.mark.parametrize("num", [None, "1"])
@pytest.mark.parametrize("rank", [None, "0"])
def test_one_rank_is_a_run_without_torchrun(num: str | None, rank: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if (num, rank) == (None, "0"):
        return
    for name, value in (("WORLD_SIZE", num), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert here() == Launch()


BAD_SCORES = {
    "text": ({"f1": "0.5"}, "returned a str as 'f1'"),
    "nothing": ({"f1": None}, "returned a NoneType as 'f1'"),
    "several": ({"f1": np.ones(2)}, "returned a ndarray of shape [2] as 'f1'"),
    "complex": ({"f1": 1j}, "returned a complex as 'f1'"),
    "too large": ({"f1": 10**400}, "returned a int as 'f1'"),
    "no name": ({3: 0.5}, "returned 3 as the name of a score: return text as names"),
    "no dict": ([0.5], "returned a list: return a dict such as"),
}


@pytest.mark.parametrize("kind", BAD_SCORES)
def test_scores_that_are_none(kind: str) -> None:
    scores, told = BAD_SCORES[kind]
    task = Task("mine", "mine.py", "torch", print, print, print, evaluate=lambda model: scores)
    with pytest.raises(TaskError, match=re.escape(f"evaluate() of mine {told}")):
        scores_of(task, None)


def test_scores_of_several_numbers_and_of_none(tmp_path: Path) -> None:
    bad = "\ndef evaluate(model):\n    return {'a[/b]\\x1b[31m': torch.ones(2)}\n"
    done = run("train", write_task(tmp_path, bad), "--out", tmp_path / "bad", "--steps", 1, "--no-compare")
    assert_refused(done, r"returned a Tensor of shape [2] as 'a[/b]\x1b[31m': return one number for each name")
    assert (tmp_path / "bad" / "model.safetensors").exists()
    nan = "\ndef evaluate(model):\n    return {'f1': torch.tensor(float('nan'))}\n"
    train(write_task(tmp_path, nan), tmp_path / "nan", "--steps", 1, "--no-compare")
    assert summary_of(tmp_path / "nan")["scores"] == {"f1": "nan"}


ESCAPE = "\x1b[31m[/b]"


def test_messages_hold_no_escape_sequences(tmp_path: Path) -> None:
    """Errors, tracebacks and warnings, which quote names, paths and what a task raises."""
    told = "\\x1b[31m[/b]"
    assert_refused(run_here("train", ESCAPE), f"there is no task {told}")
    for code in (
        f"raise ValueError({ESCAPE!r})",
        f"import warnings, bigbatch\nwarnings.warn({ESCAPE!r}, bigbatch.BigBatchWarning)",
    ):
        task = write_task(
            tmp_path, f"\ndef evaluate(model):\n    {code.replace(chr(10), chr(10) + '    ')}\n    return {{}}\n"
        )
        done = run("train", task, "--out", tmp_path / str(len(code)), "--steps", 1, "--no-compare")
        assert told in done.stderr
        assert "\x1b" not in done.stderr


def test_printed_results_hold_no_escape_sequences(tmp_path: Path) -> None:
    """The names of parameters that `verify` prints, and the name of the page that `report` has written."""
    code = f"\ndef model():\n    return torch.nn.Sequential({{{ESCAPE!r}: torch.nn.Linear(6, 3)}})\n"
    code = code.replace("Sequential(", "Sequential(__import__('collections').OrderedDict(").replace(")})", ")}))")
    verified = run("verify", write_task(tmp_path, code), "--batch-size", 8, "--micro-batch-size", 3)
    assert "\\x1b[31m[/b].weight" in verified.stdout, verified.stderr
    reported = run("report", write_run(tmp_path / "run"), "--out", tmp_path / "a\x1b[31m.html")
    assert "a\\x1b[31m.html" in reported.stdout, reported.stderr
    assert "\x1b" not in verified.stdout + reported.stdout


def test_missing_config_file(tmp_path: Path) -> None:
    assert_refused(run_here("train", write_task(tmp_path), "--config", tmp_path / "no.toml"), "cannot read", "no.toml")


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert_refused(run("train", write_task(tmp_path), "--out", file / "run"), "Not a directory", "--out", code=4)
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


def test_doctor_shows_an_error_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FRAMEWORKS", {"torch": r"raise ValueError('[/b] \x1b[31m')"})
    console = Console(file=StringIO(), width=200)
    doctor.examine(console)
    assert r"does not load: ValueError: [/b] \x1b[31m" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("framework", ["keras", "tensorflow"])
def test_an_optimizer_with_a_schedule_of_its_own(framework: str, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(
        f"import {framework}\nimport keras, numpy as np\n"
        "def model(): return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])\n"
        "def batches(batch_size): return [(np.zeros((4, 3), 'float32'), np.zeros((4, 2), 'float32'))]\n"
        + (
            "loss = 'mse'\n"
            if framework == "keras"
            else "def loss(model, batch): return keras.ops.mean(model(batch[0]))\n"
        )
        + "def optimizer(): return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))\n"
    )
    done = run("train", task, "--out", tmp_path / "run", "--steps", 2, "--batch-size", 4, "--micro-batch-size", 2)
    assert_refused(done, "the optimizer of task has a learning rate schedule of its own", "pass --schedule")
