"""`outrider generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outrider.commands.options import Grouped, In, device, number_or_auto
from outrider.commands.output import console, progress_bar
from outrider.errors import UsageError
from outrider.runtime.params import DEFAULTS, RANGES, RULES, SamplingParams

if TYPE_CHECKING:
    from outrider.runtime.generation import Event

Command = TypeVar("Command", bound=Callable[..., None])


GROUPS = PROMPT, CHOICE, PENALTIES, END, SPECULATION, OUTPUT = (
    "Prompt",
    "Choice of tokens",
    "Penalties",
    "End of the text",
    "Speculation",
    "Output",
)


def number(name: str, group: str, text: str) -> Callable[[Command], Command]:
    """The option of one of `params.RANGES`."""
    kind, _, wanted = RANGES[name]
    default = getattr(DEFAULTS, name)
    flag = f"--{name.replace('_', '-')}"
    return click.option(
        flag,
        name,
        cls=In,
        group=group,
        type=kind,
        default=default,
        show_default=default is not None,
        help=f"{text} Range: {wanted}.",
    )


def _biases(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[int, float]:
    try:
        biases = [(int(token), float(bias)) for token, bias in (text.split(":") for text in texts)]
    except ValueError:
        raise click.BadParameter(f"{' '.join(texts)!r} is not of the form TOKEN_ID:BIAS, such as 42:-100") from None
    if len(dict(biases)) < len(biases):
        raise click.BadParameter("a token has two biases")
    return dict(biases)


@click.command("generate", cls=Grouped)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompt", cls=In, group=PROMPT, metavar="TEXT", help="The prompt; without it, standard input is read to its end."
)
@click.option("--chat", cls=In, group=PROMPT, is_flag=True, help="Put the prompt into the bundle's chat template.")
@number("temperature", CHOICE, "Divides the logits; 0 is greedy.")
@number("top_p", CHOICE, "Keep the fewest tokens whose probabilities reach this sum.")
@number("top_k", CHOICE, "Keep the most likely tokens; 0 or -1 keeps all.")
@number("min_p", CHOICE, "Keep tokens at least this likely, compared with the most likely one.")
@number("seed", CHOICE, "Fixes the answer.")
@click.option(
    "--logit-bias",
    cls=In,
    group=CHOICE,
    multiple=True,
    callback=_biases,
    metavar="TOKEN_ID:BIAS",
    help="Added to the token's logit. May be given more than once. Range: from -100 to 100.",
)
@number("repetition_penalty", PENALTIES, "Divides positive and multiplies negative logits of tokens in prompt or answer.")
@number("presence_penalty", PENALTIES, "Subtracted from the logits of tokens that the answer has.")
@number("frequency_penalty", PENALTIES, "Subtracted for each time that the answer has the token.")
@number("max_new_tokens", END, "The longest answer.")
@number("min_new_tokens", END, "The shortest answer.")
@click.option(
    "--stop", cls=In, group=END, multiple=True, metavar="TEXT", help="End before this text. May be given more than once."
)
@click.option(
    "--stop-token-id",
    "stop_token_ids",
    cls=In,
    group=END,
    type=int,
    multiple=True,
    metavar="TOKEN_ID",
    help="End with this token. May be given more than once.",
)
@click.option(
    "--k",
    cls=In,
    group=SPECULATION,
    default="auto",
    show_default=True,
    callback=number_or_auto,
    help="Draft tokens a round: one of the built numbers, 0 for plain decoding, or auto, which chooses each round.",
)
@click.option(
    "--drafter",
    cls=In,
    group=SPECULATION,
    type=click.Choice(["model", "ngram", "auto"]),
    help="Where drafted tokens come from: the draft model, what followed earlier in the text, or what is faster."
    "  [default: auto where --k is, else the model if there is one]",
)
@click.option(
    "--rule",
    cls=In,
    group=SPECULATION,
    type=click.Choice(RULES),
    help="Which drafted tokens are accepted.  [default: exact-match with a --seed, else rejection]",
)
@number("logprobs", OUTPUT, "With --json: each token's logprob, and those of so many most likely tokens.")
@device
@click.option("--show", cls=In, group=OUTPUT, is_flag=True, help="Colour the text by origin, and end with a line of figures.")
@click.option(
    "--json",
    "as_json",
    cls=In,
    group=OUTPUT,
    is_flag=True,
    help="Print one JSON object on standard output, and nothing else there.",
)
def command(
    bundle: Path,
    prompt: str | None,
    chat: bool,
    k: int | str,
    drafter: str | None,
    device: str | None,
    show: bool,
    as_json: bool,
    **params: Any,
) -> None:
    """Continue a prompt. Only confirmed tokens are ever printed."""
    if show and as_json:
        raise UsageError("--show and --json exclude each other", "choose one")
    if params["logprobs"] is not None and not as_json:
        raise UsageError("logprobs are only in the JSON output", "add --json")
    asked = SamplingParams(**params)
    from outrider.runtime.generation import Outrider

    text = _read_prompt() if prompt is None else prompt
    with progress_bar() as progress:
        loaded = Outrider.load(bundle, progress, device=device)
    events = loaded.generate(text, asked, k=k, drafter=drafter, chat=chat)
    if as_json:
        _print_json(events)
    else:
        _print_text(events, show)


def _read_prompt() -> str:
    if sys.stdin is None:  # closed by whoever started us
        raise UsageError("there is no prompt: standard input is closed", "give one with --prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("the prompt on standard input is not UTF-8 text", "convert it to UTF-8") from error


def _print_text(events: Iterator[Event], show: bool) -> None:
    screen = console() if show else None
    event = None
    for event in events:
        for text, from_draft in event.pieces:
            if screen is None:
                click.echo(text.encode("utf-8", "replace"), nl=False)
            else:
                screen.out(text, style="green" if from_draft else "yellow", highlight=False, end="")
    click.echo()
    assert event is not None  # a generation has at least one round
    if event.finish_reason == "capacity":
        click.echo("stopped: the bundle's capacity is full; build with a larger --capacity for longer texts", err=True)
    if screen is not None:
        if screen.is_terminal:
            screen.print("[green]accepted draft[/green]  [yellow]target's own[/yellow]", markup=True, highlight=False)
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
    said: dict[str, object] = {
        "text": text,
        "token_ids": ids,
        "from_draft": from_draft,
        "finish_reason": event.finish_reason,
        "stats": event.stats.as_dict(),
    }
    if event.logprobs is not None:
        said["logprobs"] = logprobs
    click.echo(json.dumps(said))
