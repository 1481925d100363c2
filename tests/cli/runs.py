"""Invented but realistic run folders of `bigbatch train`."""

import json
import math
from pathlib import Path

import numpy as np

OPTIONS = {"task": "digits", "framework": "torch", "batch_size": 256, "micro_batch_size": 32, "epochs": 8, "lr": 0.001,
           "warmup_steps": 6, "schedule": "cosine", "clip_norm": 1.0, "seed": 0, "device": "cpu"}  # fmt: skip
VERIFICATION = {
    "is_exact": True, "max_error": 2.1e-15, "total_error": 8.4e-16, "tolerance": 1e-9,
    "errors": {"layers.0.bias": 4.2e-16, "layers.0.weight": 2.1e-15, "layers.2.weight": 0.0, "layers.2.bias": 1.3e-15},
    "causes": ["dropout was switched off in 1 module, so that both gradients could be compared"],
}  # fmt: skip


def records(num_steps=48, *, batch_size=256, micro_batch_size=32, speed=1300.0, noise=0.0, seed=0):
    """A history whose loss shrinks; `noise` is its deviation from another one with the same seed."""
    random = np.random.default_rng(seed)
    wiggle, stray = random.normal(size=(3, num_steps)), np.random.default_rng(seed + 1).normal(size=num_steps)
    stray[::9] = 0.0
    found, seconds = [], 0.25
    for step in range(num_steps):
        seconds += batch_size / speed * (1 + 0.05 * abs(wiggle[2][step]))
        loss = float(0.05 + 2.25 * math.exp(-step / 9) * (1 + 0.05 * wiggle[0][step]) + noise * stray[step])
        found.append({
            "step": step, "epoch": step // 6, "ends_epoch": step % 6 == 5, "loss": loss, "terms": [loss],
            "weight": batch_size, "grad_norm": float(0.1 + 1.8 * math.exp(-step / 15) * (1 + 0.1 * wiggle[1][step])),
            "num_micro_batches": -(-batch_size // micro_batch_size), "micro_batch_size": micro_batch_size,
            "is_applied": True, "reduction": "mean", "noise_scale": None,
            "lr": 0.001 * min(1.0, (step + 1) / 6) * (0.5 + 0.5 * math.cos(math.pi * step / num_steps)),
            "num_samples": batch_size, "seconds": seconds,
        })  # fmt: skip
    return found


def summary(history, *, batch_size=256, micro_batch_size=32, peak_bytes=31_457_280, accuracy=0.975):
    last = [record["loss"] for record in history[-6:]]
    seconds = history[-1]["seconds"] if history else 0.0
    num_samples = batch_size * len(history)
    return {
        "version": "0.1.0", "task": "digits", "framework": "torch", "device": "cpu", "status": "finished",
        "batch_size": batch_size, "micro_batch_size": micro_batch_size,
        "num_micro_batches": -(-batch_size // micro_batch_size), "num_steps": len(history),
        "num_epochs": -(-len(history) // 6), "num_samples": num_samples,
        "loss": float(np.mean(last)) if last else "nan", "scores": {"accuracy": accuracy}, "seconds": seconds,
        "samples_per_second": num_samples / seconds if seconds else None, "peak_bytes": peak_bytes,
        "full_batch": None, "comparison": None, "verification": None,
    }  # fmt: skip


def write(folder, history, summary, config):
    folder.mkdir(parents=True, exist_ok=True)
    times = [{"step": record["step"], "seconds": record["seconds"]} for record in history]
    timeless = [{name: value for name, value in record.items() if name != "seconds"} for record in history]
    for name, lines in (("history.jsonl", timeless), ("times.jsonl", times)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (folder / "config.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
    return folder


def write_run(
    folder: Path, *, num_steps=48, batch_size=256, micro_batch_size=32, peak_bytes=31_457_280, speed=1300.0,
    noise=3e-8, has_full_batch=True, verification=VERIFICATION, change=None, change_record=None, **config,
):  # fmt: skip
    """Writes a run folder, by default with its full batch. `change(summary)` and `change_record(record)` edit it."""
    sizes = {"batch_size": batch_size, "micro_batch_size": micro_batch_size}
    history = records(num_steps, **sizes, speed=speed, noise=noise)
    ours = summary(history, **sizes, peak_bytes=peak_bytes)
    ours["verification"] = verification
    options = {**OPTIONS, **sizes, "compare": has_full_batch, **config}
    if has_full_batch:
        whole = {"batch_size": batch_size, "micro_batch_size": batch_size}
        theirs = records(num_steps, **whole, speed=1420.0)
        full = summary(theirs, **whole, peak_bytes=batch_size * 868_352, accuracy=0.975)
        write(folder / "full_batch", theirs, full, {**options, "micro_batch_size": batch_size, "compare": False})
        kept = ("loss", "scores", "seconds", "samples_per_second", "peak_bytes")
        ours["full_batch"] = {"status": "finished", "reason": None, **{key: full[key] for key in kept}}
        distances = [abs(a["loss"] - b["loss"]) for a, b in zip(history, theirs, strict=True)]
        ours["comparison"] = {
            "max_weight_difference": 3.1e-7 if noise else 0.0,
            "worst_weight": "layers.2.weight",
            "max_loss_difference": max(distances, default=0.0),
        }
    if change:
        change(ours)
    if change_record:
        for record in history:
            change_record(record)
    return write(folder, history, ours, options)


def fail(summary, reason="it ended with exit code 1: RuntimeError: out of memory"):
    """Changes the summary to that of a run whose full batch did not fit into memory."""
    empty = dict.fromkeys(("loss", "seconds", "samples_per_second", "peak_bytes"))
    summary["full_batch"] = {"status": "failed", "reason": reason, "scores": {}, **empty}
