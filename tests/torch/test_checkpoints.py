"""A loop that is stopped anywhere and taken up again ends as if nothing had happened."""

import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from bigbatch import BigBatchWarning, History, Interrupted, OptionError, OrderError, StateError, windows
from bigbatch.core.checkpoint.store import Store
from bigbatch.torch import Accumulator, Checkpoints

from .training import muon_and_adamw

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 54, 16, 3
NUM_BATCHES = -(-NUM_SAMPLES // BATCH_SIZE) * EPOCHS


def data() -> TensorDataset:
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x[:NUM_SAMPLES], dtype=torch.float32) / 16, torch.tensor(y[:NUM_SAMPLES]))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    x = x + 0.1 * float(np.random.rand()) + 0.1 * random.random()  # augmented by whoever draws
    return F.cross_entropy(model(x), y)


class Loop:
    """A training loop with all that draws random numbers or remembers something."""

    def __init__(self, folder: Path, kind: str = "", every: Any = 1) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.kind = kind
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
        if kind == "bf16":
            model = model.bfloat16()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=NUM_BATCHES)
        if kind == "momentum":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
        if kind == "nadam":  # has a float32 of its own for each parameter, which is float64
            model = model.double()
            optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if kind == "two optimizers":
            optimizer = muon_and_adamw(model)
            scheduler = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizer]
        options: dict[str, Any] = {"scheduler": scheduler, "clip_norm": 1.0}
        if kind == "fp16":
            options["precision"] = "fp16"
        if kind == "micro-batches":
            self.accumulator = Accumulator(model, optimizer, accumulation_steps=3, **options)
        else:
            self.accumulator = Accumulator(model, optimizer, loss, micro_batch_size=6, **options)
        generator = torch.Generator().manual_seed(7) if kind == "generator" else None
        self.loader: Any = DataLoader(data(), BATCH_SIZE, shuffle=True, generator=generator)
        if kind == "sampler":
            sampler = RandomSampler(data(), generator=torch.Generator().manual_seed(7))
            self.loader = DataLoader(data(), BATCH_SIZE, sampler=sampler)
        if kind == "batch sampler":
            sampler = RandomSampler(data(), generator=torch.Generator().manual_seed(7))
            self.loader = DataLoader(data(), batch_sampler=BatchSampler(sampler, BATCH_SIZE, drop_last=False))
        self.history = History()
        self.checkpoints = Checkpoints(folder, self.accumulator, every=every, history=self.history)

    def run(self, stop: int | None = None) -> "Loop":
        for x, y in self.checkpoints.batches(self.loader, EPOCHS):
            self.checkpoints.wait()  # as a disk that is quick, so that there is one of every batch
            if self.checkpoints.num_batches == stop:
                break
            x = x.to(self.accumulator.model[0].weight.dtype)
            if self.kind == "micro-batches":
                with self.accumulator.micro_batch(weight=len(y)) as micro:
                    micro.backward(loss(self.accumulator.model, (x, y)))
                if micro.step is not None:
                    self.history.append(micro.step)
            else:
                self.history.append(self.accumulator.step((x, y)))
        self.checkpoints.close()
        return self

    def ends_as(self, other: "Loop") -> bool:
        own, theirs = (
            torch.nn.utils.parameters_to_vector(loop.accumulator.model.parameters()) for loop in (self, other)
        )
        buffers = zip(self.accumulator.model.buffers(), other.accumulator.model.buffers(), strict=True)
        return (
            torch.equal(own, theirs)
            and all(torch.equal(*pair) for pair in buffers)
            and self.history.to_lines() == other.history.to_lines()
        )


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*BatchNorm.*")
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield


KINDS = ["", "momentum", "nadam", "bf16", "fp16", "generator", "sampler", "batch sampler", "micro-batches"]
KINDS += ["two optimizers"]


EVERYWHERE = pytest.param(range(NUM_BATCHES + 1), marks=pytest.mark.slow)


@pytest.mark.parametrize("stops", [(0, 5), EVERYWHERE], ids=["two", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_anywhere(kind: str, stops: Sequence[int], tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole", kind).run()
    for stop in stops:
        folder = tmp_path / f"{stop}"
        Loop(folder, kind).run(stop)
        assert Loop(folder, kind).run().ends_as(whole), f"stopped after {stop} batches"


class Shuffled:
    """Draws the order from the number of the epoch, as a DistributedSampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(torch.randperm(7, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 7


def stream_of_windows(kind: str) -> Any:
    numbers: Any = TensorDataset(torch.arange(7.0)[:, None])
    if kind == "by its own generator":
        return windows(DataLoader(numbers, shuffle=True, generator=torch.Generator().manual_seed(7)), 2)
    if kind == "by the epoch":
        return windows(DataLoader(numbers, sampler=Shuffled()), 2)
    return windows(DataLoader(numbers), lambda step: 1 + step)  # ever longer


def seen_in_windows(folder: Path, kind: str, stop: int | None, *, is_same: bool) -> list[Any]:
    """All that is trained on; left after `stop` windows and entered again, in the same process or another."""
    seen = []
    data: Any = stream_of_windows(kind)
    for last in (stop, None):
        model = nn.Linear(1, 1)
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.0), lambda model, batch: model(batch[0]).mean()
        )
        with Checkpoints(folder, accumulator, every=1) as checkpoints:
            for part in (stop, None) if is_same else (last,):
                for number, window in enumerate(checkpoints.batches(data, epochs=3), 1):
                    accumulator.step(window)
                    seen.append([x.tolist() for (x,) in window])
                    if number == part:
                        checkpoints.save(wait=True)
                        break
        if is_same or stop is None:
            return seen
        data = stream_of_windows(kind)
    return seen


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("kind", ["by its own generator", "by the epoch", "ever longer"])
def test_windows_are_taken_up(kind: str, is_same: bool, tmp_path: Path) -> None:
    whole = seen_in_windows(tmp_path / "whole", kind, None, is_same=False)
    assert sorted(x for window in whole for x in window) == sorted([[float(x)]] for x in range(7) for _ in range(3))
    for stop in range(1, len(whole) + 1):
        assert seen_in_windows(tmp_path / f"{stop}", kind, stop, is_same=is_same) == whole, f"left after {stop}"


def test_windows_of_what_is_gone_through_once_are_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(OptionError, match="data is a list_iterator, which can be iterated only once"):
        next(loop.checkpoints.batches(windows(iter([1, 2]), 2)))


def test_stopped_again_and_again_with_few_checkpoints(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole").run()
    for stop in (2, 4, 7, 9, 11):
        Loop(tmp_path / "broken", every=2).run(stop)
    assert Loop(tmp_path / "broken", every=2).run().ends_as(whole)


def test_without_the_random_numbers_it_would_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Loop(tmp_path / "whole").run()
    Loop(tmp_path / "other").run(5)
    monkeypatch.setattr(Checkpoints, "_set_random", lambda *_: None)
    assert not Loop(tmp_path / "other").run().ends_as(whole)


class Augmented(TensorDataset):
    """Drawn anew whenever it is asked for, from what dropout draws from too."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.rand(()), y


def stepped(folder: Path, stop: int, how: str) -> Loop:
    """A loop that saves by hand when it stops at a batch; goes to its end if there is no such batch."""
    loop = Loop(folder, every=None)
    loop.loader = DataLoader(Augmented(*data().tensors), BATCH_SIZE, shuffle=True)
    num_calls = 0

    def interrupting(model: nn.Module, batch: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if how == "in the step" and loop.checkpoints.num_batches == stop and num_calls % 3 == 2:
            loop.accumulator.interrupt()
        return loss(model, batch)

    loop.accumulator.loss = interrupting
    try:
        for batch in loop.checkpoints.batches(loop.loader, EPOCHS):
            is_last = loop.checkpoints.num_batches == stop
            if is_last and how == "before the step":
                break
            num_calls = 0
            loop.history.append(loop.accumulator.step(batch))
            if is_last and how == "in the loop":
                loop.checkpoints.save(wait=True)
            if is_last:
                break
    except Interrupted:
        assert loop.accumulator.state_dict()["window"] is not None
    if how != "in the loop" and stop >= 0:
        loop.checkpoints.save(wait=True)
    loop.checkpoints.close()
    return loop


@pytest.mark.parametrize("how", ["before the step", "in the step", "in the loop", "after the step"])
def test_saved_by_hand(how: str, tmp_path: Path) -> None:
    """Whether the batch in hand is done or not, no batch is done twice and none is left out."""
    whole = stepped(tmp_path / "whole", -1, "")
    assert len(whole.history) == NUM_BATCHES
    for stop in range(0, NUM_BATCHES, 3 if how == "after the step" else 2):
        if how == "in the step" and stop % 4 == 3:
            continue  # the last batch of an epoch has one micro-batch
        stepped(tmp_path / f"{stop}", stop, how)
        assert stepped(tmp_path / f"{stop}", -1, "").ends_as(whole), f"stopped at batch {stop}"


def test_a_loop_that_is_left_and_taken_up_in_the_same_process(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole").run()
    loop = Loop(tmp_path / "left")
    for stop in (2, 5, 6):
        for batch in loop.checkpoints.batches(loop.loader, EPOCHS):
            loop.history.append(loop.accumulator.step(batch))
            if len(loop.history) == stop:
                break
    assert loop.run().ends_as(whole)


def test_a_slow_disk_does_not_stop_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = Store._write

    def slow(*args: Any) -> None:
        assert may_write.wait(60)
        write(*args)

    monkeypatch.setattr(Store, "_write", slow)
    loop = Loop(tmp_path)
    for batch in loop.checkpoints.batches(loop.loader, EPOCHS):
        loop.history.append(loop.accumulator.step(batch))
        if len(loop.history) == NUM_BATCHES:
            assert not list(tmp_path.glob("0*"))
            may_write.set()
    loop.checkpoints.close()
    assert len(list(tmp_path.glob("0*"))) == 2


def test_more_epochs_of_a_finished_loop(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole", "momentum")
    for x, y in whole.checkpoints.batches(whole.loader, 2):
        whole.history.append(whole.accumulator.step((x, y)))
    whole.checkpoints.close()
    longer = Loop(tmp_path / "whole", "momentum").run()
    assert longer.ends_as(Loop(tmp_path / "at once", "momentum").run())


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1))


def test_a_window_with_sparse_gradients_that_is_open(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = Embedded()
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2)
        return model, accumulator, Checkpoints(tmp_path, accumulator, every=None)

    def feed(model: Any, accumulator: Any, seed: int) -> None:
        x = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(seed))
        with accumulator.micro_batch(weight=4) as micro:
            micro.backward(model(x).square().mean())

    model, accumulator, checkpoints = make()
    feed(model, accumulator, 1)
    checkpoints.save(wait=True)
    feed(model, accumulator, 2)
    checkpoints.close()
    other, taken_up, checkpoints = make()
    assert checkpoints.restore()
    feed(other, taken_up, 2)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def test_a_sparse_buffer_and_a_complex_one(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(6, 2)
        model.register_buffer("neighbours", torch.randn(6, 6).relu().to_sparse())
        model.register_buffer("waves", torch.randn(3, 2, dtype=torch.complex128))
        return model

    models = [make(0), make(1)]
    for model, is_saved in zip(models, (True, False), strict=True):
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 5)
        with Checkpoints(tmp_path, accumulator) as checkpoints:
            if is_saved:
                checkpoints.save(wait=True)
            else:
                assert checkpoints.restore()
    for one, other in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(one.to_dense(), other.to_dense())


def refused(folder: Path, model: nn.Module, optimizer: Any = None, **more: Any) -> str:
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(folder, Accumulator(model, optimizer, loss, 5), **more)
    with pytest.raises(StateError) as error:
        checkpoints.restore()
    checkpoints.close()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    return str(error.value)


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    def net(width: int = 32) -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, width), nn.Linear(width, 10))

    model = net()
    checkpoints = Checkpoints(tmp_path, Accumulator(model, torch.optim.AdamW(model.parameters()), loss, 5))
    checkpoints.save(wait=True)
    checkpoints.close()
    assert "0.weight is torch.float32[32, 64] in the checkpoint but torch.float32[16, 64]" in refused(tmp_path, net(16))
    assert "only the model has 2.bias" in refused(tmp_path, net().append(nn.Linear(10, 10)))
    assert "torch.float64" in refused(tmp_path, net().double())
    other = net()
    groups = torch.optim.AdamW([{"params": other[0].parameters()}, {"params": other[1].parameters()}])
    assert "groups of [4] parameters in the checkpoint but of [2, 2]" in refused(tmp_path, other, groups)
    assert "accumulator, ema, model, optimizer" in refused(tmp_path, net(), ema=net())
    other = net()
    kind = torch.optim.SGD(other.parameters(), lr=0.1)
    assert "the optimizer of the checkpoint is AdamW, that of this run is SGD" in refused(tmp_path, other, kind)


def test_another_schedule_or_order_changes_nothing(tmp_path: Path) -> None:
    def trained(schedule: Any = torch.optim.lr_scheduler.StepLR, *, is_reversed: bool = False) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[::-1] if is_reversed else parameters)
        return model, Accumulator(model, optimizer, loss, 5, scheduler=schedule(optimizer, 5))

    def refused(model: nn.Module, accumulator: Accumulator) -> str:
        before = [p.detach().clone() for p in model.parameters()]
        with Checkpoints(tmp_path, accumulator) as checkpoints, pytest.raises(StateError) as error:
            checkpoints.restore()
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        assert not accumulator.optimizer.state
        return str(error.value)

    with Checkpoints(tmp_path, trained()[1]) as checkpoints:
        checkpoints.save(wait=True)
    text = refused(*trained(torch.optim.lr_scheduler.CosineAnnealingLR))
    assert "the scheduler of the checkpoint is StepLR, that of this run is CosineAnnealingLR" in text
    text = refused(*trained(is_reversed=True))
    assert "the optimizer holds 1.weight where it held 0.weight when the checkpoint was saved" in text
    with Checkpoints(tmp_path, trained()[1]) as checkpoints:
        assert checkpoints.restore()


def test_a_schedule_that_the_accumulator_gets_later_is_saved(tmp_path: Path) -> None:
    def made() -> tuple[Accumulator, Checkpoints]:
        model = nn.Linear(10, 10)
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, 5)
        checkpoints = Checkpoints(tmp_path, accumulator)
        accumulator.scheduler = torch.optim.lr_scheduler.StepLR(accumulator.optimizer, 1, 0.5)
        return accumulator, checkpoints

    accumulator, checkpoints = made()
    with checkpoints:
        accumulator.step((torch.ones(5, 10), torch.ones(5, dtype=torch.long)))
        checkpoints.save(wait=True)
    found, checkpoints = made()
    with checkpoints:
        assert checkpoints.restore()
    assert found.scheduler.last_epoch == 1
    assert found.scheduler.get_last_lr() == [0.5]


def test_other_optimizers_change_nothing(tmp_path: Path) -> None:
    def trained(*groups: int) -> Accumulator:
        """Two layers, whose parameters the optimizers with these numbers hold."""
        model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
        held = [[p for p, at in zip(model.parameters(), groups, strict=True) if at == one] for one in sorted({*groups})]
        optimizers = [torch.optim.AdamW(parameters) for parameters in held]
        return Accumulator(model, optimizers, loss, 5, scheduler=[])

    with Checkpoints(tmp_path, trained(0, 1)) as checkpoints:
        checkpoints.save(wait=True)
    for groups, message in (
        ((1, 0), "the optimizer holds 1.weight where it held 0.weight"),
        ((0, 0), "the checkpoint has accumulator, model, optimizer, optimizer 2 but this run accumulator, model, opt"),
    ):
        accumulator = trained(*groups)
        before = torch.nn.utils.parameters_to_vector(accumulator.model.parameters())
        with Checkpoints(tmp_path, accumulator) as checkpoints, pytest.raises(StateError, match=message):
            checkpoints.restore()
        assert torch.equal(before, torch.nn.utils.parameters_to_vector(accumulator.model.parameters()))
    with Checkpoints(tmp_path, trained(0, 1)) as checkpoints:
        assert checkpoints.restore()


class Counter:
    """Something of the user's that is saved along."""

    def __init__(self, num: int, *, is_picky: bool = False) -> None:
        self.num, self.is_picky = num, is_picky

    def state_dict(self) -> dict[str, int]:
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.is_picky:
            raise ValueError("not this one")
        self.num = state["num"]


def test_one_that_refuses_its_state_leaves_all_as_it_was(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, Loop(tmp_path / "a").accumulator, one=Counter(1), two=Counter(2)) as checkpoints:
        checkpoints.save(wait=True)
    loop = Loop(tmp_path / "b")
    model, one = loop.accumulator.model, Counter(10)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    before = [p.detach().clone() for p in model.parameters()]
    checkpoints = Checkpoints(tmp_path, loop.accumulator, one=one, two=Counter(20, is_picky=True))
    with pytest.raises(StateError, match="not this one"):
        checkpoints.restore()
    assert one.num == 10
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_what_is_saved_along_and_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(64, 10)
    accumulator = Accumulator(model, torch.optim.AdamW(model.parameters()), loss, 5)
    with Checkpoints(tmp_path, accumulator, ema=nn.Linear(4, 3)) as checkpoints:
        checkpoints.save(wait=True)
    text = refused(tmp_path, nn.Linear(64, 10), ema=nn.Linear(4, 2))
    assert "weight is torch.float32[3, 4] in the checkpoint but torch.float32[2, 4]" in text


def test_the_data_has_become_shorter(tmp_path: Path) -> None:
    Loop(tmp_path).run(3)
    loop = Loop(tmp_path)
    loop.loader = DataLoader(TensorDataset(*data()[:20]), BATCH_SIZE, shuffle=True)
    with pytest.raises(StateError, match="after 3 batches of epoch 1 but data has only 2"):
        loop.run()


def test_a_generator_cannot_be_taken_up(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a generator, which can be iterated only once"):
        next(Loop(tmp_path).checkpoints.batches(batch for batch in [1]))


def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole").run()
    Loop(tmp_path / "broken").run(6)
    newest = max((tmp_path / "broken").glob("[0-9]*")) / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 16
    newest.write_bytes(content)
    with pytest.warns(BigBatchWarning, match=r"000006 is damaged \(state.safetensors is not as it was written\)"):
        assert Loop(tmp_path / "broken").run().ends_as(whole)


def test_names_that_are_taken_and_times_that_are_none(tmp_path: Path) -> None:
    accumulator = Loop(tmp_path).accumulator
    with pytest.raises(OptionError, match="model is saved already"):
        Checkpoints(tmp_path, accumulator, model=accumulator.model)
    for every in (0, -1, "10 parsecs", "min", True, "1.5", "0s"):
        with pytest.raises(OptionError, match=r"pass steps \(100\) or a time \(10min\)"):
            Checkpoints(tmp_path, accumulator, every=every)


def test_more_is_saved_along(tmp_path: Path) -> None:
    accumulator = Loop(tmp_path / "a").accumulator
    ema = torch.optim.swa_utils.AveragedModel(accumulator.model)
    ema.update_parameters(accumulator.model)
    with Checkpoints(tmp_path / "b", accumulator, ema=ema) as checkpoints:
        checkpoints.save(wait=True)
    other = torch.optim.swa_utils.AveragedModel(Loop(tmp_path / "a").accumulator.model)
    with Checkpoints(tmp_path / "b", accumulator, ema=other) as checkpoints:
        assert checkpoints.restore()
    assert int(other.n_averaged) == 1


def test_what_would_run_code_is_not_saved(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"f": {"inner": print}}

    checkpoints = Checkpoints(tmp_path, Loop(tmp_path / "a").accumulator, odd=Odd())
    with pytest.raises(StateError, match="trained/parts/odd/f/inner is a builtin_function_or_method"):
        checkpoints.save()


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.checkpoints.save(wait=True)
    code = (
        "import sys; from bigbatch.core.checkpoint.store import Store\n"
        "try: Store(sys.argv[1]).load()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.startswith("OrderError")
    loop.checkpoints.close()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == ""


def test_a_fork_does_not_write(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.checkpoints.save(wait=True)
    pid = os.fork()
    if not pid:
        try:
            loop.checkpoints.save()
        except OrderError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
