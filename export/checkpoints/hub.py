"""Models on the Hugging Face hub: their commit, their size, and their download with progress."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import SourceError
from outrider.errors import reason_of as whole_reason
from outrider.progress import Progress

Value = TypeVar("Value")

TIMEOUT = 10.0  # seconds to wait for the hub's answer
# Files that no export reads: other formats of the weights, folders, and pictures.
UNUSED = ("*/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.pth", "consolidated*", "*.md", "*.png", "*.jpg", ".*")
OTHER_WEIGHTS = ("*.bin", "*.pt")  # unused if there are safetensors


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model's commit on the hub, and the files of it that an export reads."""

    revision: str
    files: dict[str, int]  # bytes by name; empty if the hub cannot be reached

    @classmethod
    def read(cls, repo: str) -> Snapshot:
        """Ask the hub for a model's newest commit. Without a connection, it is the newest one that was downloaded.

        Raises:
            SourceError: the hub has no such model or refuses access, or it cannot be reached and nothing was downloaded.
        """
        from huggingface_hub import HfApi, try_to_load_from_cache

        def ask() -> tuple[str, dict[str, int]]:
            found = HfApi().model_info(repo, timeout=TIMEOUT, files_metadata=True)
            if not isinstance(found.sha, str):
                raise ValueError("the hub names no commit")
            return found.sha, {each.rfilename: int(each.size or 0) for each in found.siblings or ()}

        try:
            revision, sizes = _asked(repo, ask)
        except ConnectionError as error:
            path = try_to_load_from_cache(repo, "config.json")
            if not isinstance(path, str):
                raise SourceError(
                    f"{repo} is neither a file nor a folder, was not downloaded, and the hub cannot be reached: {error}",
                    "check the name and the connection; $HF_HUB_OFFLINE turns the connection off",
                ) from error
            return cls(Path(path).parent.name, {})
        unused = UNUSED + (OTHER_WEIGHTS if any(name.endswith(".safetensors") for name in sizes) else ())
        return cls(revision, {name: size for name, size in sizes.items() if not any(fnmatch(name, each) for each in unused)})


def download(repo: str, progress: Progress) -> None:
    """Download what an export reads of a model, unless it is here. An interrupted download is continued.

    Without a connection nothing is downloaded; if a file is missing, whoever reads it says so.

    Raises:
        SourceError: the hub refuses access or stops answering, or the disk is full.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.utils.tqdm import tqdm

    snapshot = Snapshot.read(repo)
    here = {name: try_to_load_from_cache(repo, name, revision=snapshot.revision) for name in snapshot.files}
    missing = [name for name in snapshot.files if not isinstance(here[name], str)]
    if not missing:
        return
    progress.stage(f"downloading {repo}", sum(snapshot.files[name] for name in missing))

    class Reported(tqdm):
        """Passes the client's progress on; it shows nothing itself."""

        def update(self, n: float | None = 1) -> None:
            if getattr(self, "unit", "B") == "B":
                progress.advance(int(n or 0))

    for name in missing:
        try:
            _asked(repo, lambda name=name: hf_hub_download(repo, name, tqdm_class=Reported))  # type: ignore[misc]
        except ConnectionError as error:
            raise SourceError(
                f"the download of {repo} stopped at {name}: {error}",
                "check the connection and run again: what was downloaded is kept",
            ) from error


def _asked(repo: str, ask: Callable[[], Value]) -> Value:
    """Return the hub's answer.

    Raises:
        ConnectionError: there is none.
        SourceError: it is a refusal, or the disk is full.
    """
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return ask()
    except GatedRepoError as error:
        hint = "accept its terms on the hub, then log in with hf auth login or set $HF_TOKEN"
        raise SourceError(f"{repo} is gated: access needs approval", hint) from error
    except RepositoryNotFoundError as error:
        hint = "check the name; for a private model, log in with hf auth login or set $HF_TOKEN"
        raise SourceError(
            f"{repo} is neither a file nor a folder, and the hub has no public model of that name", hint
        ) from error
    except HFValidationError as error:
        raise SourceError(f"{repo} does not exist, and is not a valid id on the hub", "check the path") from error
    except Exception as error:  # of the HTTP client, and of the hub's
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SourceError(
                f"no room to download {repo}", "free some disk space and run again: what was downloaded is kept"
            ) from error
        raise ConnectionError(_reason(error)) from error


def _reason(error: Any) -> str:
    return whole_reason(error)[:200]
