"""`outrider generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outrider.commands.options import (
    GroupedCommand,
    GroupedOption,
    bundle_of,
    chat_template,
    device,
    drafter,
    k,
    memory_file,
    model,
    stage_cores,
)
from outrider.commands.output import console, print_pieces, progress_bar, standard_error_discarded
from outrider.errors import UsageError
from outrider.prepare.wanted import Wanted
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import DEFAULTS, RANGES, RULES, SamplingParams

if TYPE_CHECKING:
    from outrider.runtime.generation import Event

Command = TypeVar("Command", bound=Callable[..., None])

GROUPS = ("Prompt", "Sampling", "Penalties", "Stopping", "Speculation", "Output")
PROMPT, SAMPLING, PENALTIES, STOPPING, SPECULATION, OUTPUT = GROUPS


def number(name: str, group: str, text: str) -> Callable[[Command], Command]:
    """Return the option for one of `params.RANGES`."""
    kind, _, range_text = RANGES[name]
    default = getattr(DEFAULTS, name)
    return click.option(
        f"--{name.replace('_', '-')}",
        name,
        cls=GroupedOption,
        group=group,
        type=kind,
        default=default,
        show_default=default is not None,
        help=f"{text} Range: {range_text}.",
    )


def _biases(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[int, float]:
    try:
        biases = [(int(token), float(bias)) for token, bias in (text.split(":") for text in texts)]
    except ValueError:
        raise click.BadParameter(f"{' '.join(texts)!r} is not of the form TOKEN_ID:BIAS, such as 42:-100") from None
    if len(dict(biases)) < len(biases):
        raise click.BadParameter("the same token has two biases")
    return dict(biases)


def _structured(_: click.Context, __: click.Parameter, text: str | None) -> StructuredOutputs | None:
    if text is None:
        return None
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("it is not an object")
        return StructuredOutputs(**given)
    except (ValueError, TypeError, RecursionError) as error:
        raise click.BadParameter(f"{text[:60]!r} cannot be read: {error}") from None


@click.command("generate", cls=GroupedCommand)
@model
@click.option("--prompt", cls=GroupedOption, group=PROMPT, metavar="TEXT", help="The prompt.  [default: all of standard input]")
@click.option("--chat", cls=GroupedOption, group=PROMPT, is_flag=True, help="Apply the chat template to the prompt.")
@chat_template
@click.option(
    "--allow-special-tokens",
    cls=GroupedOption,
    group=PROMPT,
    is_flag=True,
    help="With --chat: parse special tokens in the text of the prompt.",
)
@number("temperature", SAMPLING, "Divide the logits by this; 0 is greedy decoding.")
@number("top_p", SAMPLING, "Keep the smallest set of tokens whose probabilities add up to this.")
@number("top_k", SAMPLING, "Keep this many of the most likely tokens; 0 or -1 keeps all.")
@number("min_p", SAMPLING, "Keep tokens at least this likely relative to the most likely one.")
@number("seed", SAMPLING, "Make sampling reproducible.")
@click.option(
    "--logit-bias",
    cls=GroupedOption,
    group=SAMPLING,
    multiple=True,
    callback=_biases,
    metavar="TOKEN_ID:BIAS",
    help="Add BIAS to the logit of a token. May be repeated. Range: from -100 to 100.",
)
@number("repetition_penalty", PENALTIES, "Divide positive and multiply negative logits of tokens in the prompt or answer.")
@number("presence_penalty", PENALTIES, "Subtract this from the logits of tokens already in the answer.")
@number("frequency_penalty", PENALTIES, "Subtract this for each time a token occurs in the answer.")
@number("max_new_tokens", STOPPING, "Maximum number of new tokens.")
@click.option(
    "--structured-outputs",
    cls=GroupedOption,
    group=SAMPLING,
    callback=_structured,
    metavar="JSON",
    help="Constrain the text: an object with one of json (a schema), regex, choice, grammar and json_object, as in vLLM. For"
    """ instance '{"choice": ["yes", "no"]}' or '{"json": {"type": "object"}}'.""",
)
@number("min_new_tokens", STOPPING, "Minimum number of new tokens.")
@click.option(
    "--stop", cls=GroupedOption, group=STOPPING, multiple=True, metavar="TEXT", help="Stop before this text. May be repeated."
)
@click.option(
    "--stop-token-id",
    "stop_token_ids",
    cls=GroupedOption,
    group=STOPPING,
    type=int,
    multiple=True,
    metavar="TOKEN_ID",
    help="Stop after this token. May be repeated.",
)
@k
@drafter
@memory_file
@click.option(
    "--rule",
    cls=GroupedOption,
    group=SPECULATION,
    type=click.Choice(RULES),
    help="How draft tokens are accepted.  [default: exact-match with --seed, else rejection]",
)
@number("logprobs", OUTPUT, "With --json: the logprob of each token, and of this many most likely tokens.")
@stage_cores
@device
@click.option(
    "--show",
    cls=GroupedOption,
    group=OUTPUT,
    is_flag=True,
    help="Colour the text by origin, and end with a line of statistics.",
)
@click.option(
    "--json",
    "as_json",
    cls=GroupedOption,
    group=OUTPUT,
    is_flag=True,
    help="Print one JSON object on standard output, and nothing else.",
)
def command(
    wanted: Wanted,
    prompt: str | None,
    chat: bool,
    chat_template: str | None,
    allow_special_tokens: bool,
    k: int | str,
    drafter: str | None,
    memory_file: Path | None,
    stage_cores: int | None,
    device: str | None,
    show: bool,
    as_json: bool,
    **params: Any,
) -> None:
    """Generate text from a prompt. Only confirmed tokens are printed.

    MODEL is a bundle, or an export, a checkpoint folder, a GGUF file or an id on the Hugging Face hub, such as OWNER/NAME,
    or OWNER/NAME:Q4_K_M for a GGUF file. It is exported and built first, into the cache that outrider cache lists.
    """
    if show and as_json:
        raise UsageError("--show and --json cannot be combined", "leave one of them out")
    if params["logprobs"] is not None and not as_json:
        raise UsageError("logprobs appear only in JSON output", "add --json")
    if chat_template is not None and not chat:
        raise UsageError("--chat-template needs --chat", "add --chat, or leave it out")
    if allow_special_tokens and not chat:
        raise UsageError("--allow-special-tokens needs --chat", "leave it out: only chat messages are restricted")
    sampling = SamplingParams(**params)
    from outrider.runtime.generation import Outrider
    from outrider.runtime.memory.memory import Memory

    text = _read_prompt() if prompt is None else prompt
    made = bundle_of(wanted, device, k, stage_cores)
    with progress_bar() as progress:
        memory = None if memory_file is None else Memory(file=memory_file)
        loaded = Outrider.load(
            made.bundle,
            progress,
            device=device,
            chat_template=chat_template,
            memory=memory,
            checked=made.checked,
            stage_cores=stage_cores,
        )
    with standard_error_discarded():
        events = loaded.generate(text, sampling, k=k, drafter=drafter, chat=chat, allow_special_tokens=allow_special_tokens)
    if as_json:
        _print_json(events)
    else:
        _print_text(events, show)
    if memory is not None:
        memory.write()


def _read_prompt() -> str:
    if sys.stdin is None:  # the parent process closed it
        raise UsageError("there is no prompt: standard input is closed", "pass one with --prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("the prompt on standard input is not UTF-8 text", "convert it to UTF-8") from error


def _print_text(events: Iterator[Event], show: bool) -> None:
    screen, terminal = console() if show else None, sys.stdout.isatty()
    event = None
    for event in events:
        print_pieces(event.pieces, screen, terminal)
    click.echo()
    assert event is not None  # a generation has at least one round
    if event.finish_reason == "capacity":
        click.echo("stopped: the cache is full; for longer texts, build with a larger --capacity", err=True)
    if screen is not None:
        if screen.is_terminal:
            screen.print("[green]accepted draft token[/green]  [yellow]target token[/yellow]", markup=True, highlight=False)
        click.echo(event.stats.line())


def _print_json(events: Iterator[Event]) -> None:
    ids: list[int] = []
    from_draft: list[bool] = []
    logprobs: list[object] = []
    text = ""
    event = None
    for event in events:
        ids += event.token_ids
        from_draft += event.from_draft
        logprobs += [{"logprob": each.logprob, "top": each.top} for each in event.logprobs or ()]
        text += event.text
    assert event is not None  # a generation has at least one round
    result: dict[str, object] = {
        "text": text,
        "token_ids": ids,
        "from_draft": from_draft,
        "finish_reason": event.finish_reason,
        "stats": event.stats.as_dict(),
    }
    if event.logprobs is not None:
        result["logprobs"] = logprobs
    click.echo(json.dumps(result))
