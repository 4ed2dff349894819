"""`outrider train-draft`: from texts to a draft that was served and measured."""

from __future__ import annotations

import gc
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from transformers import AutoTokenizer

from outrider.builder.build import build_engine
from outrider.bundle.folder import staged, write_error
from outrider.bundle.manifest import MANIFEST, TOKENIZER
from outrider.errors import FolderError, ParityError, UsageError
from outrider.export.checkpoint import load_model, load_tokenizer, read_config
from outrider.export.pair import export_pair
from outrider.progress import SILENT, Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.stats import Stats
from outrider.training.answers import Answers, Example, given_examples, has_chat, held_out, prompts_of
from outrider.training.arguments import Arguments
from outrider.training.eagle3 import open_head
from outrider.training.loop import Schedule, device, fit, has_bf16
from outrider.training.objective import Objective, measure
from outrider.training.pard import PardObjective
from outrider.training.report import Report, write_report

SLOTS = 8  # prompts that are answered at once
CHUNK = 64
TOLERANCE = 0.1  # of the mean acceptance length, between training and serving
DRAFTERS = {"eagle3": "head", "pard": "parallel"}


class Data(NamedTuple):
    """What a draft is trained on, and what it is measured on."""

    trained: list[Example]
    held_out: list[Example]  # answered greedily, as they will be when the draft is served


def train_draft(arguments: Arguments, progress: Progress = SILENT) -> Report:
    """Train a draft, write it, and serve it to check that it is accepted as often as in training.

    An interrupted run goes on where it was: answers and checkpoints are kept in `arguments.work` until the draft is written.

    Raises:
        UsageError: the texts are too few or too short, or the target has no chat template for them.
        SourceError, UnsupportedModelError: a checkpoint cannot be read, or does not fit.
        EngineError: an engine or the training failed.
        ParityError: the draft is accepted more or less often when served than in training.
        FolderError: something cannot be written.
    """
    work = arguments.work
    try:
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / ".lock", timeout=0):
            report = _train(arguments, work, progress)
    except Timeout:
        raise FolderError(f"another process is training {arguments.output}", "wait for it, or choose another output") from None
    except OSError as error:
        raise write_error(work, error) from error
    shutil.rmtree(work, ignore_errors=True)
    return report


def _train(arguments: Arguments, work: Path, progress: Progress) -> Report:
    options = arguments.options
    data = _data(arguments, work, progress)
    gc.collect()  # the engines
    objective = _objective(arguments, data, progress)
    schedule = Schedule(options["epochs"], options["batch"], options["accumulate"], arguments.learning_rate, options["seed"])
    made_of = arguments.kind, options["start"], options["draft_vocab"], schedule, data.trained
    folder = work / f"checkpoints-{arguments.digest(*made_of)}"
    history = fit(objective, data.trained, data.held_out, schedule, folder, progress)
    progress.stage("measuring the draft")
    trained = measure(objective, data.held_out, options["k"])
    with staged(arguments.output) as folder:
        objective.write(folder)
        parameters = sum(each.numel() for each in objective.parameters() if each.requires_grad)
        del objective
        gc.collect()
        served = _serve(arguments, folder, data.held_out, work / "served", progress)
        _check_served(trained, served)
        tokens = sum(sum(example.drafted) for example in data.trained)
        report = Report(arguments.kind, arguments.target.name, parameters, len(data.trained), tokens, history, trained, served)
        write_report(folder, report)
    return report


def _data(arguments: Arguments, work: Path, progress: Progress) -> Data:
    options = arguments.options
    bundle = options["bundle"] or _bundle(arguments, None, work / f"answering-{arguments.digest()}", progress)
    progress.stage("loading the target's engines")
    outrider = Outrider.load(bundle, slots=None)
    if load_tokenizer(arguments.target).json != (bundle / TOKENIZER).read_text(encoding="utf-8"):
        raise UsageError(f"{bundle} has another tokenizer than {arguments.named}", "build it from this target", param="bundle")
    longest = min(options["max_length"], outrider.build.capacity)
    answers = Answers(
        work / "answers.jsonl",
        hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest(),
        SamplingParams(temperature=options["temperature"], max_new_tokens=options["max_new_tokens"]),
        longest,
    )
    chat, text = has_chat(outrider), outrider.text
    if options["given"]:
        kept = given_examples(arguments.samples, text, longest)
        prompts = [example.ids[: example.drafted.index(True)] for example in kept]
    else:
        kept, prompts = [], prompts_of(arguments.samples, text, chat, longest)
    apart = held_out(len(prompts))
    asked = {
        index: answers.prompt(ids, options["seed"] + index, greedy=away or not options["temperature"])
        for index, (ids, away) in enumerate(zip(prompts, apart, strict=True))
        if away or not kept
    }
    answers.generate(outrider, [*asked.values()], progress)
    answered = {index: answers.example(prompt) for index, prompt in asked.items()}
    trained = [kept[index] if kept else answered[index] for index, away in enumerate(apart) if not away]
    return Data(trained, [answered[index] for index, away in enumerate(apart) if away and sum(answered[index].drafted) > 1])


def _objective(arguments: Arguments, data: Data, progress: Progress) -> Objective:
    progress.stage("loading the models")
    options = arguments.options
    if arguments.kind == "pard":
        assert arguments.start is not None
        read_config(arguments.start)
        model = load_model(arguments.start, "fp32")
        model.set_attn_implementation("sdpa")
        tokenizer = arguments.start.read("tokenizer", AutoTokenizer)
        return PardObjective(model, tokenizer, options["k"])
    read_config(arguments.target)
    target = load_model(arguments.target, "bf16" if has_bf16() else "fp32").to(device())
    return open_head(target, arguments.start, _frequent(data.trained, target, options["draft_vocab"]), options["k"])


def _frequent(examples: Sequence[Example], target: Any, count: int) -> torch.Tensor:
    """Return the most frequent tokens of the answers, int64 [count] ascending; the lowest ids where there are too few."""
    rows = int(target.get_output_embeddings().weight.shape[0])
    drafted = [token for example in examples for token, own in zip(*example, strict=True) if own]
    counts = torch.tensor(drafted).bincount(minlength=rows)[:rows]
    return counts.sort(descending=True, stable=True).indices[: min(count, rows)].sort().values


def _bundle(arguments: Arguments, draft: Path | None, folder: Path, progress: Progress) -> Path:
    """Return a bundle of the target, alone or with a draft; an earlier run may have made it."""
    bundle, options = folder / "bundle", arguments.options
    if not bundle.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        drafts = [] if draft is None else [str(draft)]
        manifest = export_pair(arguments.named, drafts, folder / "onnx", precision=options["precision"], progress=progress)
        limits = [model.max_positions for model in manifest.models.values() if model.max_positions]
        build_engine(
            folder / "onnx",
            bundle,
            backend="onnxruntime",
            k=[options["k"]],
            capacity=min([-(-options["max_length"] // 64) * 64, *limits]),
            batch=1 if draft is not None else SLOTS,
            max_prompt_chunk=CHUNK,
            progress=progress,
        )
        shutil.rmtree(folder / "onnx")
    return bundle


def _serve(arguments: Arguments, draft: Path, examples: Sequence[Example], folder: Path, progress: Progress) -> Stats:
    """Return how often a draft is accepted when its engines draft for the target's."""
    shutil.rmtree(folder, ignore_errors=True)  # of another draft
    bundle, k, stats = _bundle(arguments, draft, folder, progress), arguments.options["k"], Stats()
    with Outrider.load(bundle) as outrider:
        progress.stage("serving the draft", len(examples))
        for example in examples:
            prompt, tokens = example.ids[: example.drafted.index(True)], sum(example.drafted)
            params = SamplingParams(max_new_tokens=tokens)
            for event in outrider.generate(prompt, params, k=k, drafter=DRAFTERS[arguments.kind]):
                last = event.stats
            stats.add(last)
            progress.advance(1)
    return stats


def _check_served(trained: Stats, served: Stats) -> None:
    expected, actual = trained.mean_acceptance_length, served.mean_acceptance_length
    if abs(actual / expected - 1) > TOLERANCE:
        raise ParityError(
            f"the draft is not finished: a round emits {actual:.2f} tokens when it is served, and {expected:.2f} in training",
            "the checkpoints are kept; report this, with the names of target and draft",
        )
