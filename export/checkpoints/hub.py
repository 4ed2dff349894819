"""Models on the Hugging Face hub: their commit, their files, and their download with progress."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from outrider.bundle.folder import FULL, write_whole
from outrider.errors import FolderError, SourceError, UnsupportedModelError
from outrider.errors import reason_of as whole_reason
from outrider.progress import Progress

Value = TypeVar("Value")

NO_ROOM = "free some disk space and run again: complete files are kept; or set $HF_HOME to a folder on a larger disk"
TIMEOUT = 10.0  # seconds to wait for the hub's answer
# Files that no export reads: other formats of the weights, folders, and pictures.
UNUSED = ("*/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.pth", "consolidated*", "*.md", "*.png", "*.jpg", ".*")
TEMPLATES = "additional_chat_templates/*.jinja"  # the one folder that is read
SAFETENSORS, OTHER_WEIGHTS = "*.safetensors", ("*.bin", "*.pt")  # the others are unused if there are safetensors
GGUF, ACCESSORIES = ".gguf", ("mmproj", "imatrix")  # files of this suffix with these in their names have no language model
PART = re.compile(r"-\d{5}-of-(\d{5})$")  # of a model in several GGUF files


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One commit of a model on the hub, and the files of it that an export reads."""

    repo: str
    revision: str
    files: dict[str, int]  # bytes by name; a single GGUF file, or those of a checkpoint

    @classmethod
    def read(cls, repo: str, tag: str = "") -> Snapshot:
        """Ask the hub for a model's newest commit. Without a connection, it is the newest one that was downloaded.

        Args:
            tag: the name of a GGUF file, or its end, such as Q4_K_M. It may be empty if there is only one, or a checkpoint.

        Raises:
            SourceError: the hub has no such model or file or refuses access, the tag is missing, or the hub cannot be reached
                and nothing was downloaded.
            UnsupportedModelError: the model is in several GGUF files.
        """
        from huggingface_hub import HfApi

        def ask() -> tuple[str, dict[str, int]]:
            found = HfApi().model_info(repo, timeout=TIMEOUT, files_metadata=True)
            if not isinstance(found.sha, str):
                raise ValueError("the hub names no commit")
            return found.sha, {each.rfilename: int(each.size or 0) for each in found.siblings or ()}

        try:
            revision, sizes = _asked(repo, ask)
        except ConnectionError as error:
            revision, sizes = _downloaded(repo)
            if not sizes:
                raise SourceError(
                    f"{repo} is neither a file nor a folder, was not downloaded completely, and the hub cannot be reached:"
                    f" {error}",
                    "check the name and the connection; $HF_HUB_OFFLINE turns the connection off",
                ) from error
        return cls(repo, revision, {name: sizes[name] for name in _read_of(repo, sizes, tag)})

    @property
    def folder(self) -> Path:
        """The folder of this commit in the hub's cache, where `download` puts the files."""
        return _cached(self.repo) / "snapshots" / self.revision

    @property
    def gguf(self) -> str | None:
        """The name of the GGUF file; None for a checkpoint."""
        return next((name for name in self.files if name.endswith(GGUF)), None)

    def download(self, progress: Progress, names: Collection[str] | None = None) -> None:
        """Download the files, or some of them, unless they are here. Those that are complete are kept if the download ends.

        Raises:
            SourceError: the hub refuses access or stops answering, or the disk is full.
        """
        wanted = self.files if names is None else [name for name in self.files if name in names]
        if missing := [name for name in wanted if not self._is_whole(name)]:
            self._check_room(missing)
            self._fetch(missing, progress)
        if names is None:  # without a connection, a later process uses a commit that is here completely
            _remember(self.repo, self.revision)

    def _is_whole(self, name: str) -> bool:
        """Return whether a file is here with its size, which the hub may not have told."""
        try:
            size = (self.folder / name).stat().st_size
        except OSError:
            return False
        return size == (self.files[name] or size)

    def _check_room(self, names: Collection[str]) -> None:
        """Check that the disk has room for some files.

        Raises:
            SourceError: it has not.
        """
        folder = next(each for each in _cached(self.repo).absolute().parents if each.exists())
        needed, free = sum(self.files[name] for name in names), shutil.disk_usage(folder).free
        if needed > free:
            sizes = f"the files take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {folder}"
            raise SourceError(f"no room to download {self.repo}: {sizes}", NO_ROOM)

    def _fetch(self, names: list[str], progress: Progress) -> None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils.tqdm import tqdm

        progress.stage(f"downloading {self.repo}", sum(self.files[name] for name in names))

        class Reported(tqdm):
            """Passes the client's progress on; it shows nothing itself."""

            def update(self, n: float | None = 1) -> None:
                if getattr(self, "unit", "B") == "B":
                    progress.advance(int(n or 0))

        def fetch(name: str) -> None:
            damaged = (self.folder / name).exists()
            hf_hub_download(self.repo, name, revision=self.revision, force_download=damaged, tqdm_class=Reported)

        for name in names:
            try:
                _asked(self.repo, lambda name=name: fetch(name))  # type: ignore[misc]
            except ConnectionError as error:
                raise SourceError(
                    f"the download of {self.repo} stopped at {name}: {error}",
                    "check the connection and run again: complete files are kept",
                ) from error


def _read_of(repo: str, names: Collection[str], tag: str) -> list[str]:
    """Return the names of the files that an export reads: those of a checkpoint, or one GGUF file."""
    used = [name for name in names if fnmatch(name, TEMPLATES) or not any(fnmatch(name, each) for each in UNUSED)]
    others = [name for name in used if any(fnmatch(name, each) for each in OTHER_WEIGHTS)]
    tensors = [name for name in used if fnmatch(name, SAFETENSORS)]
    ggufs = [name for name in names if name.endswith(GGUF) and not any(each in name.lower() for each in ACCESSORIES)]
    if tag or (ggufs and not tensors and not others):
        return [_named(repo, sorted(ggufs), tag)]
    return [name for name in used if not tensors or name not in others]


def _named(repo: str, names: list[str], tag: str) -> str:
    """Return the GGUF file of a tag, or the only one."""
    stems = {name: PART.sub("", PurePosixPath(name).stem) for name in names}
    wanted = tag.lower().removesuffix(GGUF)
    fitting = [name for name in names if stems[name].lower() == wanted] or [
        name for name in names if not tag or stems[name].lower().endswith(("-" + wanted, "." + wanted))
    ]
    whole = [name for name in names if not PART.search(PurePosixPath(name).stem)]
    parts = PART.search(PurePosixPath(fitting[0]).stem) if fitting else None
    if parts and (tag or not whole) and len({stems[name] for name in fitting}) == 1:
        raise UnsupportedModelError(
            f"{fitting[0]} of {repo} is one of {int(parts[1])} files of a model",
            "choose another, or download and merge them with llama.cpp's llama-gguf-split --merge",
        )
    if len(usable := [name for name in fitting if name in whole]) == 1:
        return usable[0]
    ends = [re.split("[-.]", stems[name])[-1] for name in whole]
    choices = ends if len({*map(str.lower, ends)}) == len(ends) else [stems[name] for name in whole]
    what = f"no GGUF file {tag}" if tag and not fitting else f"several GGUF files{f' {tag}' if tag else ''}"
    hint = f"name one of them, as in {repo}:{choices[0]}; it has {', '.join(choices)}" if choices else "leave the tag out"
    raise SourceError(f"{repo} has {what}", hint)


def _cached(repo: str) -> Path:
    """Return the folder of a model in the hub's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"))


def _downloaded(repo: str) -> tuple[str, dict[str, int]]:
    """Return the newest commit that was downloaded, and the sizes of its files; no sizes if there is none."""
    try:
        revision = (_cached(repo) / "refs" / "main").read_text().strip()
        folder = _cached(repo) / "snapshots" / revision
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return revision, {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    except (OSError, ValueError):
        return "", {}


def _remember(repo: str, revision: str) -> None:
    """Make a commit the one that a process without a connection uses, as the hub's client does for its downloads."""
    reference = _cached(repo) / "refs" / "main"
    with suppress(OSError, FolderError):  # a cache that this user may only read
        if not reference.exists() or reference.read_text() != revision:
            reference.parent.mkdir(parents=True, exist_ok=True)
            write_whole(reference, revision.encode())


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
        if isinstance(error, OSError) and error.errno in FULL:
            raise SourceError(f"no room to download {repo}", NO_ROOM) from error
        raise ConnectionError(_reason(error)) from error


def _reason(error: Any) -> str:
    return whole_reason(error)[:200]
