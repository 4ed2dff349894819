"""`outrider chat`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.commands.generate import OUTPUT, PROMPT, SAMPLING, STOPPING, number
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
)
from outrider.commands.output import console, print_pieces, printable, progress_bar, standard_error_discarded
from outrider.errors import OutriderError, UsageError
from outrider.prepare.wanted import Wanted
from outrider.runtime.params import RANGES, SamplingParams
from outrider.runtime.text.stream import NONE_SHOWN, TOKEN_MARK
from outrider.serve.tools import family_of
from outrider.serve.tools.base import Family, Reader

if TYPE_CHECKING:
    from outrider.runtime.request import Event
    from outrider.runtime.scheduler import Scheduler
    from outrider.runtime.stats import Stats
    from outrider.runtime.text.text import Text

UNLIMITED = 2**31 - 1  # tokens: an answer ends where the bundle's capacity does
END = 16  # tokens at the end of a prompt that may open the reasoning
HELP = """\
/clear        forget the conversation, but not the system message
/system TEXT  set the system message, or without TEXT remove it, and forget the conversation
/help         show this
/exit         leave, as Ctrl-D does
Enter sends. Alt-Enter, or Enter after a backslash, begins a new line. Ctrl-C ends an answer, or clears what is typed.
Put a space before a message that begins with such a word."""


@click.command("chat", cls=GroupedCommand)
@model
@chat_template
@click.option("--system", cls=GroupedOption, group=PROMPT, metavar="TEXT", default="", help="The system message.")
@number("temperature", SAMPLING, "Divide the logits by this; 0 is greedy decoding.")
@number("top_p", SAMPLING, "Keep the smallest set of tokens whose probabilities add up to this.")
@number("seed", SAMPLING, "Make sampling reproducible.")
@click.option(
    "--max-new-tokens",
    cls=GroupedOption,
    group=STOPPING,
    type=int,
    default=UNLIMITED,
    help=f"Maximum number of new tokens in an answer. Range: {RANGES['max_new_tokens'][2]}.  [default: as many as fit]",
)
@k
@drafter
@memory_file
@device
@click.option("--show", cls=GroupedOption, group=OUTPUT, is_flag=True, help="Colour the text by origin.")
def command(
    wanted: Wanted,
    chat_template: str | None,
    system: str,
    k: int | str,
    drafter: str | None,
    memory_file: Path | None,
    device: str | None,
    show: bool,
    **params: Any,
) -> None:
    """Hold a conversation in the terminal. Without a terminal, each line of standard input is a message.

    MODEL is a bundle, or something to make one of: see outrider generate.
    """
    if sys.stdin is None:  # the parent process closed it
        raise UsageError("there are no messages: standard input is closed", "run this in a terminal, or pipe messages into it")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    sampling = SamplingParams(**params)
    from outrider.runtime.loaded import LoadedBundle
    from outrider.runtime.memory.memory import Memory
    from outrider.runtime.scheduler import Scheduler

    made = bundle_of(wanted, device, k)
    with progress_bar() as progress:
        memory = Memory(file=memory_file)
        loaded = LoadedBundle.load(
            made.bundle, progress, device=device, chat_template=chat_template, memory=memory, checked=made.checked
        )
    if loaded.text.template is None:
        hint = "pass one with --chat-template, or continue a text with outrider generate, which needs none"
        raise UsageError("this bundle has no chat template", hint)
    conversation = TerminalChat(Scheduler(loaded, k=k, drafter=drafter), sampling, system, interactive, show)
    if interactive:
        with _interrupts(conversation.stopped):
            click.secho("/help lists what you can type; Ctrl-D leaves.", dim=True)
            conversation.hold(_typed())
    else:  # what is not UTF-8 fails as a message does
        conversation.hold(line.decode("utf-8", "surrogateescape") for line in sys.stdin.buffer)
    memory.write()


class TerminalChat:
    """A conversation. One scheduler answers all of it, so that an answer finds the conversation before it in the cache."""

    def __init__(self, scheduler: Scheduler, params: SamplingParams, system: str, interactive: bool, show: bool):
        """Begin with a system message; an empty text is none."""
        self.stopped = threading.Event()  # ends the current answer
        self._scheduler, self._params, self._interactive = scheduler, params, interactive
        self._terminal = sys.stdout.isatty()
        self._screen = console() if show and interactive else None
        self._begin(system)

    def _begin(self, system: str) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def hold(self, texts: Iterator[str]) -> None:
        """Answer messages and obey commands, until there are no more or one is /exit."""
        for text in texts:
            name, rest = (*text.split(maxsplit=1), "", "")[:2]
            if not name:
                continue
            if text[0] != "/" or not name[1:].isalpha():
                self._answer(text.strip())
            elif name == "/exit":
                return
            elif name == "/help":
                self._note(HELP)
            elif name in ("/clear", "/system"):
                self._begin(self._system if name == "/clear" else rest.strip())
                self._note("a new conversation" + (", with a system message" if self._system else ""))
            else:
                self._note(f"there is no {printable(name)}; /help lists what there is")

    def _answer(self, text: str) -> None:
        """Answer a message. If that fails, say why in one line, and forget the message."""
        self._messages.append({"role": "user", "content": text})
        try:
            self._messages.append({"role": "assistant", "content": self._say()})
            if not self._messages[-1]["content"]:  # it was stopped before its first word
                del self._messages[-2:]
        except OutriderError as error:
            self._messages.pop()
            click.echo(printable(" ".join(f"error: {error}; {error.hint}".split())), err=True)

    def _say(self) -> str:
        """Print the next answer, and return its content."""
        from outrider.runtime.text.chat_template import Chat

        scheduler, bundle = self._scheduler, self._scheduler.bundle
        self.stopped.clear()
        with standard_error_discarded():
            prompt = bundle.text.encode_chat(Chat(self._messages))
        if len(prompt) > bundle.build.capacity:
            message = f"the conversation has {len(prompt):,} tokens with this message, and the bundle's capacity is"
            raise UsageError(f"{message} {bundle.build.capacity:,}", "begin a new one with /clear, or shorten the message")
        family = family_of(bundle.text)
        channels = Channels(family, self._terminal) if family is not None and family.reads_every_answer else None
        shown = NONE_SHOWN if family is None or channels is None else family.shown
        (request,) = scheduler.submit_all([(prompt, self._params)], shown=shown)
        said = ""
        while request.finish_reason is None and not self.stopped.is_set():
            for _, result in scheduler.step():
                if isinstance(result, OutriderError):
                    click.echo(nl=bool(said))
                    raise result
                said += result.text
                if channels is None:
                    print_pieces(result.pieces, self._screen, self._terminal)
                else:
                    channels.print(result)
        click.echo()
        if request.finish_reason is None:
            scheduler.cancel(request)
        elif request.finish_reason == "capacity":
            self._note("the conversation has filled the bundle's capacity; begin a new one with /clear")
        if request.stats.emitted:
            self._note(_speed(request.stats))
        return _content(bundle.text, prompt, said) if channels is None else channels.content.strip()

    def _note(self, text: str) -> None:
        if self._interactive:
            click.secho(text, dim=True)
        else:
            click.echo(text, err=True)


class Channels:
    """Prints an answer in channels, as GPT-OSS writes: the reasoning dim, and then the content."""

    def __init__(self, family: Family, terminal: bool):
        """Begin an answer."""
        self._reader, self._terminal, self._kind = Reader(lambda reader: family.read(reader, {})), terminal, ""
        self.content = ""

    def print(self, event: Event) -> None:
        """Print what is known after an event."""
        for kind, text in self._reader.push(event.text, event.finish_reason is not None):
            text = text.replace(TOKEN_MARK, "")
            if self._kind not in ("", kind):
                click.echo("\n")
            self._kind = kind
            self.content += text if kind == "content" else ""
            if self._terminal:
                text = click.style(printable(text), dim=kind != "content")
            click.echo(text.encode("utf-8", "replace"), nl=False)


def _speed(stats: Stats) -> str:
    parts = [f"{stats.emitted} token{'s' if stats.emitted > 1 else ''}", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.drafted:
        parts.append(f"{stats.emitted / stats.rounds:.1f} tokens a round")
        parts.append(f"{stats.acceptance_rate:.0%} of drafted tokens accepted")
    return ", ".join(parts)


def _content(text: Text, prompt: list[int], said: str) -> str:
    """Return what later prompts contain of an answer: not the reasoning, as models were trained, and no white space around it,
    since templates write their own."""
    from outrider.serve.api.reasoning import ReasoningSplitter, marks_of

    if (marks := marks_of(text.tokenizer)) is not None:
        said = ReasoningSplitter(marks, text.decode(prompt[-END:])).push(said, last=True).content
    return said.strip()


def _typed() -> Iterator[str]:
    """Yield what is typed, message by message, until Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys, typing = KeyBindings(), has_focus(DEFAULT_BUFFER)  # and not searching earlier messages

    @keys.add("enter", filter=typing)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=typing)
    @keys.add("<sigint>")
    def clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    session: PromptSession[str] = PromptSession("> ", multiline=True, key_bindings=keys, prompt_continuation="  ")
    with suppress(EOFError):
        while True:
            yield session.prompt()


@contextmanager
def _interrupts(stopped: threading.Event) -> Iterator[None]:
    """Let an interrupt end the answer after the current step. An exception in a step would leave the caches in disorder."""
    previous = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
