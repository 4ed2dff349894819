"""The training loop: transformers' Trainer, with its accumulation, schedule, bf16 and checkpoints."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from outrider.errors import EngineError, FolderError
from outrider.progress import Progress
from outrider.training.answers import Example
from outrider.training.objective import Objective, TrainingBatch, measure

EVALUATIONS = 10  # during a run
LENGTH = "mean_acceptance_length"
WARM_UP = 0.03  # of the updates
# Messages of safetensors and torch about a full disk. torch's depend on where in the file the space ends.
NO_ROOM = (
    *("os error 28", "os error 27", "os error 122"),
    *("PytorchStreamWriter failed", "file write failed", "unexpected pos ", "basic_ios::clear: iostream error"),
)
NO_MEMORY = "not enough memory"  # from torch on the CPU
M_MMAP_THRESHOLD, MAPPED = -3, 4 << 20  # of glibc's malloc.h; tensors of at least this many bytes get their own mapping
FINISHED = "trainer_state.json"  # the file that Trainer writes last into a checkpoint


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to train."""

    epochs: float
    batch: int  # examples per pass
    accumulate: int  # passes per update
    learning_rate: float
    seed: int


def device() -> torch.device:
    """Return the device to train on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_bf16() -> bool:
    """Return whether this machine multiplies fast in bf16."""
    if device().type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    fast = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in fast)


def fit(
    objective: Objective,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    schedule: Schedule,
    folder: Path,
    progress: Progress,
) -> list[dict[str, float]]:
    """Train, starting from the last complete checkpoint in `folder` if there is one.

    Returns:
        The measurements: for each measured update its number `step`, and its `loss` or its `mean_acceptance_length` over the
        held-out examples.

    Raises:
        EngineError: the loss is not finite.
        OSError: a checkpoint cannot be written.
    """
    updates = math.ceil(len(examples) / (schedule.batch * schedule.accumulate)) * schedule.epochs
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=schedule.batch,
        gradient_accumulation_steps=schedule.accumulate,
        num_train_epochs=schedule.epochs,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        warmup_steps=max(int(WARM_UP * updates), 1),
        weight_decay=0.01,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=has_bf16(),
        use_cpu=device().type == "cpu",
        seed=schedule.seed,
        train_sampling_strategy="group_by_length",
        logging_steps=max(int(updates / 100), 1),
        logging_nan_inf_filter=False,
        save_steps=max(int(updates / EVALUATIONS), 1),
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # Trainer would copy the draft to the other GPUs, but not the target
    trainer = Trainer(
        model=objective,
        args=arguments,
        train_dataset=[{"input_ids": each.ids, "drafted": each.drafted} for each in examples],  # grouped by the first's length
        data_collator=lambda chosen: TrainingBatch.of([Example(*each.values()) for each in chosen])._asdict(),
        callbacks=[_Watch(objective, lambda: measure(objective, held_out, objective.steps).mean_acceptance_length, progress)],
    )
    trainer.pop_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    return [
        {"step": entry["step"], **{key: entry[key] for key in ("loss", LENGTH) if key in entry}}
        for entry in trainer.state.log_history
        if "loss" in entry or LENGTH in entry
    ]


@contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Turn errors of torch and safetensors about missing memory or disk space for `folder` into ours."""
    try:
        yield
    except (SafetensorError, RuntimeError, MemoryError) as error:
        text = str(error)
        if any(sign in text for sign in NO_ROOM):
            raise FolderError(f"no room to write {folder}", "free some disk space and run again") from error
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY in text:
            raise EngineError(
                "not enough memory to train", "use a smaller --batch with more --accumulate, or a smaller --max-length"
            ) from error
        raise


def free_memory() -> None:
    """Collect garbage, and return the memory to the system."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(AttributeError):  # only glibc has this call
            ctypes.CDLL(None).malloc_trim(0)


def map_large_tensors() -> None:
    """Make the system get a large tensor's memory back as soon as the tensor is freed.

    Batches differ in shape, so glibc would keep gigabytes of free blocks. New mappings take time, so small tensors get none.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)


def last_checkpoint(folder: Path) -> str | None:
    """Return the last complete checkpoint. After a system crash, files can be empty or full of NULs."""

    def is_whole(path: Path) -> bool:
        try:
            return isinstance(json.loads((path / FINISHED).read_bytes()), dict)
        except (OSError, ValueError):
            return False

    whole = [path for path in folder.glob("checkpoint-*") if is_whole(path)]
    return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None


class _Watch(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Reports progress, measures acceptance a few times, and stops a run whose loss is not finite."""

    def __init__(self, objective: Objective, measured: Callable[[], float], progress: Progress):
        self._objective, self._measured, self._progress = objective, measured, progress
        self._length = math.nan

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._progress.stage("training", state.max_steps)
        self._progress.advance(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        free_memory()
        self._progress.advance(1)
        if state.global_step % max(state.max_steps // EVALUATIONS, 1) == 0 or state.global_step == state.max_steps:
            self._length = self._measured()
            state.log_history.append({"step": state.global_step, LENGTH: self._length})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            if not math.isfinite(loss := logs["loss"]):
                message = f"the loss is {loss} after {state.global_step:,} updates"
                raise EngineError(message, "train again with a smaller --learning-rate")
            length = f", mean acceptance length {self._length:.2f}" if math.isfinite(self._length) else ""
            self._progress.note(f"training, loss {loss:.3f}{length}")
