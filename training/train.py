"""`outrider train-draft`: train a draft on texts, serve it, and measure it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from filelock import FileLock, Timeout

from outrider.builder.build import build_engine
from outrider.bundle.folder import staged, write_error
from outrider.bundle.manifest import TOKENIZER, Manifest
from outrider.errors import FolderError, ParityError, SourceError, UnsupportedModelError, UsageError, VocabularyMismatchError
from outrider.export.arguments import ExportArguments
from outrider.export.checkpoints.checkpoint import read_config
from outrider.export.checkpoints.source import NONE, Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.pair import export
from outrider.progress import SILENT, Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.stats import Stats
from outrider.training.answers import AnswerStore, Example, given_examples, held_out, prompts_of
from outrider.training.arguments import TrainingArguments
from outrider.training.eagle3 import Eagle3Objective
from outrider.training.loop import Schedule, fit, free_memory, map_large_tensors, translated
from outrider.training.objective import Objective, measure
from outrider.training.pard import PardObjective
from outrider.training.report import TrainingReport, write_report

OBJECTIVES: dict[str, type[Objective]] = {"eagle3": Eagle3Objective, "pard": PardObjective}
SLOTS = 8  # prompts to answer at the same time
CHUNK = 64
TOLERANCE, FEW = 0.1, 4  # how much the accepted tokens of training and serving may differ: a share of them, or a number


class Data(NamedTuple):
    """The examples for training and for measuring."""

    trained: list[Example]
    held_out: list[Example]  # answered greedily, as in serving


def train_draft(arguments: TrainingArguments, progress: Progress = SILENT) -> TrainingReport:
    """Train a draft, write it, and serve it to check that its acceptance is the same as in PyTorch.

    An interrupted run resumes: answers and checkpoints are kept in `arguments.work` until the draft is written.

    Raises:
        UsageError: the texts are too few or too short, or the target has no chat template for them.
        SourceError, UnsupportedModelError, VocabularyMismatchError: a checkpoint cannot be read, or does not fit.
        EngineError: an engine or the training failed.
        ParityError: the served draft's acceptance differs from that in PyTorch.
        FolderError: something cannot be written.
    """
    work, kind = arguments.work, OBJECTIVES[arguments.kind]
    fresh = not work.exists()
    try:
        for source in (arguments.target, arguments.start, *(adapter.source for adapter in arguments.adapters)):
            if source is not None:
                source.download(progress)
        positions = kind.check(arguments.target, arguments.start)
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / ".lock", timeout=0), translated(work):
            report = _train(arguments, kind, positions, work, progress)
    except Timeout:
        raise FolderError(f"another process is training {arguments.output}", "wait for it, or choose another output") from None
    except OSError as error:
        raise write_error(work, error) from error
    except (UsageError, SourceError, UnsupportedModelError, VocabularyMismatchError):
        if fresh:  # a run with other arguments could not resume from it
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    return report


def _train(
    arguments: TrainingArguments, kind: type[Objective], positions: int | None, work: Path, progress: Progress
) -> TrainingReport:
    options = arguments.options
    map_large_tensors()
    data = prepare_data(arguments, positions, work, progress)
    free_memory()  # of the engines
    progress.stage("loading the models")
    objective = kind.open(arguments, data.trained)
    schedule = Schedule(options["epochs"], options["batch"], options["accumulate"], arguments.learning_rate, options["seed"])
    made_of = arguments.kind, options["start"], options["draft_vocab"], options["k"], schedule, data.trained
    folder = work / f"checkpoints-{arguments.digest(*made_of)}"
    history = fit(objective, data.trained, data.held_out, schedule, folder, progress)
    with staged(arguments.output) as folder:
        objective.write(folder)
        for path in folder.iterdir():  # safetensors lets only the owner read
            path.chmod(folder.stat().st_mode & 0o666)
        parameters = sum(each.numel() for each in objective.parameters() if each.requires_grad)
        del objective
        free_memory()
        served, texts = _serve(arguments, kind, folder, data.held_out, work / "served", progress)
        free_memory()  # of the engines
        # On the served texts: other kernels give other answers, and some answers are easier to draft.
        progress.stage("measuring the written draft in PyTorch")
        objective = kind.open(replace(arguments, start=Source.parse(str(folder))), data.trained)
        trained = measure(objective, texts, options["k"])
        check_served(trained, served)
        tokens = sum(sum(example.drafted) for example in data.trained)
        report = TrainingReport(
            arguments.kind, arguments.target.name, parameters, len(data.trained), tokens, history, trained, served
        )
        write_report(folder, report)
    return report


def prepare_data(arguments: TrainingArguments, positions: int | None, work: Path, progress: Progress) -> Data:
    options, seed = arguments.options, arguments.options["seed"]
    bundle = options["bundle"] or _bundle(arguments, None, work / f"answering-{arguments.digest()}", progress)
    progress.stage("loading the target's engines")
    with Outrider.load(bundle, slots=None) as outrider:
        check_target(arguments, bundle, outrider.manifest)
        longest = min(options["max_length"], outrider.build.capacity, positions or options["max_length"])
        content = hashlib.sha256(msgspec.json.encode(outrider.manifest.files)).hexdigest()
        answers = AnswerStore(work / "answers.jsonl", content, arguments.sampling, longest)
        text = outrider.text
        kept: list[Example] = []
        if options["given"]:
            given = given_examples(arguments.samples, text, longest, outrider.manifest.generation.eos_token_ids, seed)
            kept, prompts = [each.example for each in given], [each.prompt for each in given]
        else:
            prompts = prompts_of(arguments.samples, text, longest, seed)
        apart = held_out(len(prompts))
        asked = {
            index: answers.prompt(ids, None if away or not options["temperature"] else seed + index)
            for index, (ids, away) in enumerate(zip(prompts, apart, strict=True))
            if away or not kept
        }
        answers.generate(outrider, [*asked.values()], progress)
    answered = {index: answers.example(prompt) for index, prompt in asked.items()}
    trained = [kept[index] if kept else answered[index] for index, away in enumerate(apart) if not away]
    data = Data(
        [example for example in trained if example.learnable],
        [answered[index] for index, away in enumerate(apart) if away and sum(answered[index].drafted) > 1],
    )
    if not all(data):
        raise UsageError("the target's answers have no tokens to learn", "use prompts that it answers at length", param="texts")
    return data


def check_target(arguments: TrainingArguments, bundle: Path, manifest: Manifest) -> None:
    """Refuse a bundle whose tokenizer or numbers are not the target's."""
    config, model = read_config(arguments.target), manifest.models["target"]
    text = config.get_text_config()
    differs = {
        "tokenizer": load_tokenizer(arguments.target).json != (bundle / TOKENIZER).read_text(encoding="utf-8"),
        "architecture": model.architecture not in (config.architectures or [model.architecture]),
        # A layer may have attention, a recurrence, both or neither.
        "number of layers": not model.recurrent and len(model.layers) != text.num_hidden_layers,
        "vocabulary": model.vocab_rows != text.vocab_size,
        "adapter": [(each.source.name, each.weight) for each in arguments.adapters]
        != [(each.source, each.weight) for each in model.adapters],
    }
    if what := next((name for name, other in differs.items() if other), None):
        raise UsageError(f"{bundle} has another {what} than {arguments.named}", "build it from this target", param="bundle")


def _bundle(arguments: TrainingArguments, draft: Path | None, folder: Path, progress: Progress) -> Path:
    """Return a bundle of the target, alone or with a draft, perhaps from an earlier run."""
    bundle, options = folder / "bundle", arguments.options
    if not bundle.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        drafts = [NONE] if draft is None else [str(draft)]
        models, lora = (arguments.target, drafts, folder / "onnx"), arguments.adapters
        manifest = export(ExportArguments.check(*models, precision=options["precision"], lora=lora), progress)
        limits = [model.max_positions for model in manifest.models.values() if model.max_positions]
        build_engine(
            folder / "onnx",
            bundle,
            backend="onnxruntime",
            k=[1 if draft is None else options["k"]],
            capacity=min([-(-options["max_length"] // 64) * 64, *limits]),
            batch=1 if draft is not None else SLOTS,
            max_prompt_chunk=CHUNK,
            progress=progress,
        )
        shutil.rmtree(folder / "onnx")
    return bundle


def _serve(
    arguments: TrainingArguments,
    kind: type[Objective],
    draft: Path,
    examples: Sequence[Example],
    folder: Path,
    progress: Progress,
) -> tuple[Stats, list[Example]]:
    """Serve a draft, and return its acceptance and the answers."""
    shutil.rmtree(folder, ignore_errors=True)  # of another draft
    bundle, k = _bundle(arguments, draft, folder, progress), arguments.options["k"]
    stats, answers = Stats(), []
    with Outrider.load(bundle) as outrider:
        progress.stage("serving the draft", len(examples))
        for example in examples:
            prompt, tokens = example.ids[: example.drafted.index(True)], sum(example.drafted)
            params = SamplingParams(max_new_tokens=tokens)
            events = list(outrider.generate(prompt, params, k=k, drafter=kind.drafter))
            stats.add(events[-1].stats)
            answers.append(Example.of(prompt, [token for event in events for token in event.token_ids]))
            progress.advance(1)
    return stats, answers


def check_served(trained: Stats, served: Stats) -> None:
    """Compare the accepted tokens per round in PyTorch and in serving, on the same texts.

    Raises:
        ParityError: they differ by more than different kernels and weights explain.
    """
    expected, actual = trained.mean_acceptance_length - 1, served.mean_acceptance_length - 1
    if abs(actual - expected) > max(TOLERANCE * expected, FEW / max(trained.drafting_rounds, 1)):
        raise ParityError(
            f"the served draft gets {actual:.2f} tokens accepted per round, but {expected:.2f} in PyTorch on the same texts, so"
            " it was not written",
            "report this with the names of the target and the draft; the checkpoints are kept",
        )
