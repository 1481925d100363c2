import csv
import json
import math
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

from bigbatch import History, MissingExtraError, OptionError, StateError, Step, TensorBoard
from bigbatch.core.epochs import run_epochs


def step(terms=(1.0,), weight=1, **options):
    values = {"grad_norm": 1.0, "num_micro_batches": 2, "micro_batch_size": 4, "is_applied": True, **options}
    return Step(terms=terms, weight=weight, **values)


def history(*epochs):
    """A history of these epochs, all ended."""
    made = History()
    for epoch in epochs:
        for s in epoch:
            made.append(s)
        made.end_epoch()
    return made


class Fetch:
    """Terms that are on some device, and how often they were fetched."""

    def __init__(self, *terms):
        self.terms = terms
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return self.terms


# --- Step ------------------------------------------------------------------------------------------------


def test_creating_a_step_fetches_nothing():
    fetch = Fetch(2.0)
    s = step(fetch, 3)
    history([s])
    assert (s.weight, s.grad_norm, s.num_micro_batches, s.micro_batch_size, s.is_applied) == (3, 1.0, 2, 4, True)
    assert fetch.num_calls == 0


def test_reading_fetches_once():
    fetch = Fetch(2.0, 0.5)
    s = step(fetch, (3, 4))
    assert s.loss == 2.5
    assert s.terms == (2.0, 0.5)
    assert s.loss == 2.5
    assert repr(s)
    assert s.as_dict()["loss"] == 2.5
    assert fetch.num_calls == 1


def test_loss_is_the_sum_of_its_terms():
    assert step((1.5, 0.25, 0.25), (10, 5, 1)).loss == 2.0


@pytest.mark.parametrize("weight", [0, 0.0, (0, 0)])
def test_loss_is_nan_without_weight(weight):
    terms = (0.0, 0.0) if isinstance(weight, tuple) else (0.0,)
    assert math.isnan(step(terms, weight).loss)


def test_loss_is_a_number_if_one_term_has_weight():
    assert step((0.0, 2.0), (0, 3)).loss == 2.0


def test_a_sum_without_weight_is_a_number():
    assert step((7.0,), 0, reduction="sum").loss == 7.0


def test_noise_scale_is_none_unless_given():
    assert step().noise_scale is None
    assert step(noise_scale=12.5).noise_scale == 12.5


def test_repr_says_what_was_done():
    text = repr(step((0.125,), 32, grad_norm=0.5, num_micro_batches=4, micro_batch_size=8))
    assert text == "Step(loss=0.125, weight=32, grad_norm=0.5, 4 micro-batches of 8)"
    assert "not applied" in repr(step(is_applied=False))


# --- aux and metrics ---------------------------------------------------------------------------------------


def test_a_step_without_aux_has_none():
    s = step()
    assert (s.aux, s.metrics, s.summed) == (None, {}, ())
    assert "metrics" not in s.as_dict()
    assert "summed" not in s.as_dict()
    assert s.without_aux() is s


def test_metrics_and_aux_are_fetched_once_and_only_when_read():
    aux, metrics = Fetch({"logits": [1.0, 2.0]}), Fetch()
    s = step(aux=lambda: aux()[0], metrics=lambda: metrics() or {"accuracy": 0.5})
    assert (aux.num_calls, metrics.num_calls) == (0, 0)
    for _ in range(2):
        assert s.aux == {"logits": [1.0, 2.0]}
        assert s.metrics == {"accuracy": 0.5}
    assert (aux.num_calls, metrics.num_calls) == (1, 1)


def test_a_history_fetches_no_aux_and_no_metrics():
    aux, metrics = Fetch(), Fetch()
    made = history([step(aux=aux, metrics=metrics)])
    assert made.steps[0].aux is None
    assert (aux.num_calls, metrics.num_calls) == (0, 0)


def test_a_history_keeps_metrics_and_drops_aux_but_the_step_keeps_both():
    s = step(aux={"logits": [1.0]}, metrics={"accuracy": 0.5}, summed=("correct",))
    (kept,) = history([s]).steps
    assert (kept.aux, kept.metrics, kept.summed) == (None, {"accuracy": 0.5}, ("correct",))
    assert kept.loss == s.loss
    assert s.aux == {"logits": [1.0]}


def test_as_dict_has_metrics_as_plain_numbers():
    s = step(metrics={"accuracy": np.float32(0.5), "correct": np.int64(3)}, summed=("correct",))
    found = s.as_dict()
    assert found["metrics"] == {"accuracy": 0.5, "correct": 3.0}
    assert {type(value) for value in found["metrics"].values()} == {float}
    assert found["summed"] == ["correct"]
    assert "aux" not in found


def test_repr_shows_metrics():
    text = repr(step((0.125,), 32, grad_norm=None, metrics={"accuracy": 0.90625, "correct": 29.0}))
    assert text == "Step(loss=0.125, weight=32, accuracy=0.9062, correct=29, 2 micro-batches of 4)"


def test_metrics_of_an_epoch_are_means_by_weight_and_sums():
    steps = [
        step(weight=16, metrics={"accuracy": 0.5, "correct": 8.0}, summed=("correct",)),
        step(weight=4, metrics={"accuracy": 1.0, "correct": 4.0}, summed=("correct",)),
    ]
    made = history(steps, steps[1:])
    assert made.metrics == {"accuracy": pytest.approx([0.6, 1.0]), "correct": [12.0, 4.0]}
    assert made.metrics["accuracy"][0] != pytest.approx(0.75)  # the mean of means


def test_metrics_count_by_the_weight_of_the_first_term():
    made = history([step((1.0, 1.0), (3, 100), metrics={"m": 0.0}), step((1.0, 1.0), (1, 900), metrics={"m": 1.0})])
    assert made.metrics == {"m": [0.25]}


def test_a_metric_that_some_steps_do_not_have():
    made = history([step(weight=2, metrics={"m": 1.0}), step(weight=6)], [step()], [step(metrics={"n": 2.0})])
    assert made.metrics == {"m": [1.0, pytest.approx(math.nan, nan_ok=True), pytest.approx(math.nan, nan_ok=True)],
                            "n": [pytest.approx(math.nan, nan_ok=True)] * 2 + [2.0]}  # fmt: skip


def test_metrics_leave_out_steps_without_weight_and_keep_nan_with_weight():
    made = history([step(weight=0, metrics={"m": math.nan}), step(weight=3, metrics={"m": 0.5})])
    assert made.metrics == {"m": [0.5]}
    made = history([step(weight=0, metrics={"m": 1.0})], [step(weight=1, metrics={"m": math.nan})])
    assert all(map(math.isnan, made.metrics["m"]))


def test_metrics_count_steps_that_were_not_applied_as_losses_do():
    good = step(weight=1, metrics={"m": 0.5, "n": 2.0}, summed=("n",))
    bad = step((math.nan,), 1, is_applied=False, metrics={"m": math.nan, "n": 3.0}, summed=("n",))
    made = history([good, bad])
    assert math.isnan(made.losses[0])
    assert math.isnan(made.metrics["m"][0])
    assert made.metrics["n"] == [5.0]


def test_an_empty_history_has_no_metrics():
    assert History().metrics == {}


def test_metrics_are_the_same_after_saving_and_loading(tmp_path):
    made = history(
        [step(weight=3, metrics={"a.b": 0.1, "nan": math.nan, "inf": -math.inf}, summed=("nan",)), step()],
        [step(weight=1, metrics={"a.b": 1 / 3})],
    )
    made.save(tmp_path / "history.jsonl")
    loaded = History.load(tmp_path / "history.jsonl")
    assert [repr(s.metrics) for s in loaded] == [repr(s.metrics) for s in made]
    assert [s.summed for s in loaded] == [("nan",), (), ()]
    assert repr(loaded.metrics) == repr(made.metrics)
    loaded.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "history.jsonl").read_bytes()


def test_a_file_from_before_there_were_metrics_is_read(tmp_path):
    lines = good_lines(tmp_path)
    assert not any("metrics" in line or "summed" in line for line in lines)
    assert History.load(tmp_path / "history.jsonl").metrics == {}


@pytest.mark.parametrize("bad", ['{"m": "high"}', '{"m": [1]}', "[1]", "3"])
def test_metrics_that_are_none_are_a_damaged_line(tmp_path, bad):
    path = tmp_path / "history.jsonl"
    history([step(metrics={"m": 1.0})]).save(path)
    path.write_text(path.read_text(encoding="utf-8").replace('{"m": 1.0}', bad), encoding="utf-8")
    with pytest.raises(StateError, match=r"line 1 of .* is not a step of a history"):
        History.load(path)


# --- a table -----------------------------------------------------------------------------------------------


def table(made, path):
    made.to_csv(path)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_has_a_row_for_each_step(tmp_path):
    made = history(
        [step((1 / 3,), 16, metrics={"accuracy": 0.5}), step((2.0,), 4, grad_norm=None, is_applied=False)],
        [step((math.nan,), 0, micro_batch_size=None, metrics={"accuracy": 0.1, "correct": 3.0})],
    )
    first, second, third = table(made, tmp_path / "history.csv")
    assert first == {
        "step": "0", "epoch": "0", "loss": repr(1 / 3), "grad_norm": "1.0", "num_micro_batches": "2",
        "micro_batch_size": "4", "is_applied": "True", "weight": "16", "accuracy": "0.5", "correct": "",
    }  # fmt: skip
    assert (second["grad_norm"], second["is_applied"], second["accuracy"]) == ("", "False", "")
    assert (third["step"], third["epoch"], third["loss"], third["correct"]) == ("2", "1", "nan", "3.0")


def test_a_table_has_columns_for_terms_and_for_metrics_named_like_others(tmp_path):
    made = history([step((1.0, 0.5), (3, 60), metrics={"loss": 7.0, "a, b": 1.0})])
    (row,) = table(made, tmp_path / "history.csv")
    assert (row["loss"], row["terms.0"], row["terms.1"], row["weight.0"], row["weight.1"]) == (
        "1.5", "1.0", "0.5", "3", "60",
    )  # fmt: skip
    assert (row["metrics.loss"], row["a, b"]) == ("7.0", "1.0")


def test_a_table_without_steps_has_its_header(tmp_path):
    assert table(History(), tmp_path / "history.csv") == []
    assert (tmp_path / "history.csv").read_text(encoding="utf-8").startswith("step,epoch,loss,")


def test_a_table_that_fails_leaves_the_old_file(tmp_path):
    def lost():
        raise RuntimeError("the device is gone")

    path = tmp_path / "history.csv"
    history([step()]).to_csv(path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="the device is gone"):
        history([step(), step(lost)]).to_csv(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["history.csv"]


# --- History ---------------------------------------------------------------------------------------------


def test_losses_are_means_by_weight():
    epochs = [step((1.0,), 16), step((2.0,), 16), step((9.0,), 5)], [step((4.0,), 3)]
    assert history(*epochs).losses == pytest.approx([(16 + 32 + 45) / 37, 4.0])
    assert history(*epochs).losses[0] != pytest.approx(4.0)  # the mean of means


def test_losses_divide_each_term_by_its_own_weight():
    made = history([step((1.0, 10.0), (100, 1)), step((2.0, 30.0), (300, 3))])
    assert made.losses == pytest.approx([(100 + 600) / 400 + (10 + 90) / 4])


def test_losses_skip_steps_without_weight():
    made = history([step((0.0,), 0), step((3.0,), 2), step((math.nan,), 0)])
    assert made.losses == [3.0]


def test_losses_skip_terms_without_weight():
    made = history([step((2.0, math.nan), (1, 0)), step((4.0, 1.0), (1, 8))])
    assert made.losses == pytest.approx([3.0 + 1.0])


def test_the_loss_of_an_epoch_without_weight_is_nan():
    assert math.isnan(history([step((0.0,), 0)]).losses[0])


def test_losses_of_sums_are_divided_by_the_weight():
    made = history([step((30.0,), 10, reduction="sum"), step((6.0,), 2, reduction="sum")])
    assert made.losses == pytest.approx([3.0])


def test_losses_keep_a_nan_with_weight():
    assert math.isnan(history([step((math.nan,), 1), step((1.0,), 1)]).losses[0])


def test_the_running_epoch_has_a_loss_and_an_empty_one_has_none():
    made = History()
    assert made.losses == []
    made.append(step((2.0,), 1))
    assert made.losses == [2.0]
    made.end_epoch()
    assert made.losses == [2.0]


def test_steps_in_order():
    steps = [step((float(k),)) for k in range(5)]
    made = history(steps[:2], steps[2:])
    assert made.steps == steps
    assert list(made) == steps
    assert len(made) == 5


def test_repr_of_a_history():
    assert repr(History()) == "History(0 steps in 0 epochs)"
    assert repr(history([step((2.0,))])) == "History(1 step in 1 epoch, loss 2 in the last)"
    made = history([step((2.0,)), step((4.0,), 3)], [step((1.0,), 1), step((0.5,), 3)])
    assert repr(made) == "History(4 steps in 2 epochs, loss 0.625 in the last)"


# --- epochs ------------------------------------------------------------------------------------------------


def test_on_step_is_called_with_each_step_and_its_aux():
    seen, fetch = [], Fetch(2.0)
    made = run_epochs(lambda batch: step(fetch, aux=batch), ["a", "b"], None, 2, on_step=seen.append)
    assert [s.aux for s in seen] == ["a", "b"] * 2
    assert [s.aux for s in made] == [None] * 4
    assert fetch.num_calls == 0  # nobody has read the loss


def test_an_exception_in_on_step_ends_the_training():
    taken = []

    def stop(_):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        run_epochs(lambda batch: taken.append(batch) or step(), [1, 2], None, 1, on_step=stop)
    assert taken == [1]


def test_on_step_must_be_a_function():
    with pytest.raises(OptionError, match="on_step is 'runs': pass a function"):
        run_epochs(lambda _: step(), [1], None, 1, on_step="runs")


# --- TensorBoard -------------------------------------------------------------------------------------------


def test_tensorboard_has_the_figures_of_each_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))  # or it imports TensorFlow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoard(tmp_path, first_step=10)
    log(step((2.0,), metrics={"accuracy": 0.5, "loss": 7.0}))
    log(step((math.nan,), grad_norm=None, metrics={"accuracy": 0.75}))
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    of_loss = {"loss": [(11, 2.0)], "metrics.loss": [(11, 7.0)]}
    assert found == {**of_loss, "grad_norm": [(11, 1.0)], "accuracy": [(11, 0.5), (12, 0.75)]}


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        MissingExtraError, match=r'TensorBoard needs tensorboard: pip install "bigbatch\[tensorboard\]"'
    ):
        TensorBoard(tmp_path)


# --- saving ----------------------------------------------------------------------------------------------

EPOCHS = (
    [step((1.25, 0.5), (3, 60), noise_scale=7.5), step((2.0, 1.0), (5, 17), micro_batch_size=None)],
    [step((0.0,), 0, grad_norm=0.0, is_applied=False)],
    [step((math.nan,), 4, grad_norm=math.inf, is_applied=False), step((-math.inf,), 4, grad_norm=math.nan)],
    [step((12.0,), 2.5, reduction="sum", num_micro_batches=1)],
)

VALUES = ("grad_norm", "num_micro_batches", "micro_batch_size", "is_applied", "reduction", "noise_scale")


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in ("terms", "weight", "loss", *VALUES):
            assert repr(getattr(one, name)) == repr(getattr(other, name))  # nan is not equal to itself, its repr is
    np.testing.assert_array_equal(found.losses, expected.losses)


def test_a_history_is_the_same_after_saving_and_loading(tmp_path):
    made = history(*EPOCHS)
    made.save(tmp_path / "history.jsonl")
    loaded = History.load(tmp_path / "history.jsonl")
    assert_same(loaded, made)
    loaded.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "history.jsonl").read_bytes()


def test_saving_writes_one_file(tmp_path):
    history(*EPOCHS).save(str(tmp_path / "history.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]


def test_the_file_is_strict_json_with_one_step_per_line(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    path = tmp_path / "history.jsonl"
    history(*EPOCHS).save(path)
    records = [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(record["step"], record["epoch"]) for record in records] == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3)]
    assert records[0]["terms"] == [1.25, 0.5]
    assert records[0]["loss"] == 1.75
    assert records[3]["grad_norm"] == "inf"


def test_an_empty_history_can_be_saved_and_loaded(tmp_path):
    History().save(tmp_path / "history.jsonl")
    assert len(History.load(tmp_path / "history.jsonl")) == 0


def test_an_epoch_without_steps_keeps_its_place(tmp_path):
    made = history([step((1.0,))], [], [step((3.0,))])
    made.save(tmp_path / "history.jsonl")
    loaded = History.load(tmp_path / "history.jsonl")
    loaded.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "history.jsonl").read_bytes()


def test_numpy_weights_can_be_saved(tmp_path):
    """check_weight takes numpy's numbers, so a history has to as well."""
    made = history([step((1.0,), np.int64(3)), step((2.0,), np.float32(1.5))])
    made.save(tmp_path / "history.jsonl")
    assert [s.weight for s in History.load(tmp_path / "history.jsonl")] == [3, 1.5]


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_loaded_history_continues_where_it_ended(tmp_path, is_ended):
    made = History()
    made.append(step((1.0,)))
    if is_ended:
        made.end_epoch()
    made.save(tmp_path / "history.jsonl")
    loaded = History.load(tmp_path / "history.jsonl")
    for h in (made, loaded):
        h.append(step((5.0,)))
    assert loaded.losses == made.losses


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    def lost():
        raise RuntimeError("the device is gone")

    path = tmp_path / "history.jsonl"
    made = history([step((1.0,)), step((2.0,))])
    made.save(path)
    before = path.read_bytes()
    made.append(step((3.0,)))
    made.append(step(lost))
    with pytest.raises(RuntimeError, match="the device is gone"):
        made.save(path)
    assert path.read_bytes() == before


def test_a_save_that_fails_writes_no_file(tmp_path):
    def lost():
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        history([step((1.0,)), step(lost)]).save(tmp_path / "history.jsonl")
    assert not (tmp_path / "history.jsonl").exists()


def good_lines(tmp_path):
    history([step((1.0,), 2)], [step((2.0,), 3)], [step((3.0,), 4)]).save(tmp_path / "history.jsonl")
    return (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[: len(line) // 2],  # cut off
        lambda line: "",
        lambda line: "[1, 2]",
        lambda line: "null",
        lambda line: "{}",
        lambda line: line.replace('"weight"', '"wait"'),
        lambda line: line.replace('"is_applied"', '"is_aplied"'),
        lambda line: line.replace('"terms": [2.0]', '"terms": 2.0'),
        lambda line: line.replace('"epoch": 1', '"epoch": "one"'),
        lambda line: line.replace('"epoch": 1', '"epoch": -7'),
        lambda line: line + "\ufffd",
    ],
    ids=["half", "blank", "list", "null", "empty", "no weight", "typo", "terms", "epoch", "negative epoch", "garbage"],
)
def test_a_damaged_line_is_named(tmp_path, damage):
    first, second, third = good_lines(tmp_path)
    assert damage(second) != second
    path = tmp_path / "damaged.jsonl"
    path.write_text("\n".join([first, damage(second), third]) + "\n", encoding="utf-8")
    with pytest.raises(StateError, match=r"line 2 of .*damaged\.jsonl is not a step of a history"):
        History.load(path)


def test_a_file_that_is_not_text_is_a_state_error(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(StateError, match=r"history\.jsonl"):
        History.load(path)


def test_a_missing_file_is_not_a_state_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        History.load(tmp_path / "none.jsonl")


# --- plot ------------------------------------------------------------------------------------------------


def test_plot_writes_a_picture(tmp_path):
    figure = history([step((3.0,), 2), step((1.0,), 6)], [step((1.0,), 8)]).plot(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    by_step, by_epoch = figure.axes[0].lines
    assert list(by_step.get_ydata()) == [3.0, 1.0, 1.0]
    assert list(by_epoch.get_xdata()) == [1, 2]  # at the last step of each epoch
    assert list(by_epoch.get_ydata()) == [1.5, 1.0]


def test_plot_skips_an_epoch_without_steps():
    figure = history([step((3.0,))], [], [step((1.0,)), step((2.0,))]).plot()
    _, by_epoch = figure.axes[0].lines
    assert list(by_epoch.get_xdata()) == [0, 2]
    assert list(by_epoch.get_ydata()) == [3.0, 1.5]


def test_plot_accepts_steps_without_weight(tmp_path):
    history([step((1.0,)), step((0.0,), 0)], [step((0.0,), 0)]).plot(tmp_path / "loss.svg")
    assert "<svg" in (tmp_path / "loss.svg").read_text(encoding="utf-8")


def test_plot_without_a_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history([step()]).plot()
    assert list(tmp_path.iterdir()) == []


def test_plot_without_matplotlib_names_the_extra():
    code = """
import sys
sys.modules["matplotlib"] = None
import bigbatch
try:
    bigbatch.History().plot()
except bigbatch.MissingExtraError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == 'History.plot needs matplotlib: pip install "bigbatch[cli]"\n'


def test_saving_after_every_step_writes_the_same_lines():
    growing, fetches = History(), [Fetch(float(number)) for number in range(7)]
    for number, fetch in enumerate(fetches):
        growing.append(step(fetch))
        growing.to_lines()
        if number in (2, 3):
            growing.end_epoch()
            growing.to_lines()
    whole = history([step((float(n),)) for n in range(3)], [step((3.0,))])
    for number in range(4, 7):
        whole.append(step((float(number),)))
    assert growing.to_lines() == whole.to_lines()
    assert [fetch.num_calls for fetch in fetches] == [1] * 7
