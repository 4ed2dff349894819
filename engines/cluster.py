"""The Ray cluster that processes of this machine and others belong to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from outrider.errors import EngineError, reason_of

REACHING = 10.0  # seconds; Ray itself tries for minutes
START = "start one with ray start, or unset RAY_ADDRESS; if it has a token, set RAY_AUTH_MODE=token"


def connect(cores: int = 1) -> bool:
    """Connect to the cluster at `RAY_ADDRESS`, unless this process is part of one. Without an address, start one here.

    Args:
        cores: the fewest of a cluster that is started, which has those of this machine if they are more.

    Returns:
        whether a cluster was started, which ends with this process.

    Raises:
        EngineError: the cluster cannot be reached.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "")
    local = address in ("", "local")
    _reach(address)
    most = max(cores, os.cpu_count() or 1)  # another bundle may need the rest
    options: dict[str, Any] = {"address": "local", "num_cpus": most, "include_dashboard": False} if local else {}
    done: Future[None] = Future()
    try:
        if threading.current_thread() is threading.main_thread():
            _init(done, **options)
        else:
            threading.Thread(target=_init, args=(done,), kwargs=options, daemon=True).start()
        done.result()
    except AuthenticationError as error:
        hint = "copy ~/.ray/auth_token from a machine of the cluster, or set RAY_AUTH_TOKEN_PATH"
        raise EngineError("no Ray cluster: RAY_AUTH_MODE asks for a token, and there is none", hint) from error
    except (RuntimeError, ValueError) as error:  # another release of Ray or Python, or no address
        hint = "use the same Ray and Python on all machines, and HOST:PORT as RAY_ADDRESS"
        raise EngineError(f"no Ray cluster: {reason_of(error)}", hint) from error
    except ConnectionError as error:
        raise EngineError(f"no Ray cluster: {error}", START) from error
    if local:  # Ray lets all users read it, and who has it can run code
        with contextlib.suppress(OSError):
            (Path.home() / ".ray" / "auth_token").chmod(0o600)
    return local


def _reach(address: str) -> None:
    """Raise `EngineError` if nothing listens at HOST:PORT. Other forms of an address are left to Ray."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHING).close()
    except (OSError, OverflowError, UnicodeError) as error:  # of a host's name, too
        raise EngineError(f"no Ray cluster: {address} cannot be reached: {reason_of(error)}", START) from error


def _init(done: Future[None], **options: Any) -> None:
    """Call `ray.init`. A thread other than the main one never ends after it: with the thread that started Ray's processes,
    Linux ends these."""
    try:
        with _own_sigterm():
            ray.init(**options, log_to_driver=False, logging_level="error")
    except BaseException as error:
        done.set_exception(error)
        return
    done.set_result(None)
    if threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM. Ray sets one in Python, and one in C++ that prints a stack trace and may abort."""
    python = signal.getsignal(signal.SIGTERM)
    libc, native = ctypes.CDLL(None), ctypes.create_string_buffer(1024)  # larger than a `struct sigaction`
    known = libc.sigaction(signal.SIGTERM, None, native) == 0
    try:
        yield
    finally:
        if python is not None and threading.current_thread() is threading.main_thread():  # Python lets no other one set it
            signal.signal(signal.SIGTERM, python)
        elif known:
            libc.sigaction(signal.SIGTERM, native, None)
