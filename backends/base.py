"""The interface of backends, which build and run engines: `Backend`, and the `Engines` that it opens."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outrider.backends.build_spec import BuildSpec
from outrider.backends.option import Option
from outrider.bundle.decoding import damaged
from outrider.bundle.manifest import (
    READS_FEATURES,
    ROLES,
    TOKENIZER,
    WEIGHTS,
    Build,
    Manifest,
    round_rows,
    step_file,
)
from outrider.engines.contract import Stage, StageBackend, recent_rows
from outrider.engines.device import Cpu, Device, Engine
from outrider.engines.graph_session import GraphSession
from outrider.engines.samplers import DRAFT_SAMPLERS, MARKOV
from outrider.engines.session import Session
from outrider.engines.sizes import Sizes
from outrider.engines.staged_session import StagedSession, check_stages
from outrider.errors import EngineError
from outrider.progress import Progress


class Engines(ABC):
    """A bundle's engines on a device, that of the last stage if the target's stages are on several.

    The runtime needs only sessions and samplers from it. Most backends subclass `GraphEngines`. A backend whose models are not
    graphs over bound buffers (paged attention, ragged batches) subclasses this class and makes its own sessions.
    """

    def __init__(self, folder: Path, manifest: Manifest, build: Build, device: Device):
        self.folder = folder
        self.manifest = manifest
        self.build = build
        self.device = device
        self.others: Mapping[str, Engines] = {}  # of stages, by `Build.homes`, and drafts that run elsewhere
        # Opens the stages of a target with these sizes, all but the last, in other processes.
        self.elsewhere: Callable[[Engines, Sequence[Sizes]], Session] | None = None

    @abstractmethod
    def model(self, role: str, sizes: Sizes) -> Session:
        """Return the model of one of `ROLES`, or its stage if `sizes` names one, with a fresh cache. Several threads call this
        on a CPU.

        Raises:
            EngineError: the backend refuses the model, it does not match the manifest, or there is no memory for the cache.
        """

    def session(self, role: str, batch: int) -> Session:
        """Return the model of one of `ROLES` with a fresh cache for `batch` sequences; see `model`."""
        session = self._opened(role, batch)
        if role == "target" and any(each.pairs_lone_rows(session, on_cpu) for each, on_cpu in self._kinds()):
            session.pair_lone_rows()
        return session

    def pairs_lone_rows(self, target: Session, on_cpu: bool) -> bool:
        """Return whether the target must pair lone rows because of this backend, whose part of it is on a CPU or not."""
        return False

    def _kinds(self) -> set[tuple[Engines, bool]]:
        """Return what the target runs on: the engines of each backend, and whether they or those elsewhere are on a CPU."""
        opened = [self.others.get(home, self) for home in self.build.homes]
        if self.elsewhere is None:
            return {(each, isinstance(each.device, Cpu)) for each in opened}
        return {(each, place == "cpu") for each, place in zip(opened, self.build.places, strict=True)}

    def _opened(self, role: str, batch: int) -> Session:
        whole = self.sizes(role, batch)
        if not (stages := self.build.stages_of(role)):
            drafts = role != "target" and role not in READS_FEATURES  # heads read features beside the target
            there = self.others.get(self.build.draft_device or "", self) if drafts else self
            model = there.model(role, whole)
            return model if there.device.stream == self.device.stream else StagedSession([model], [whole], whole, self.device)
        sizes = [whole.of(stage) for stage in stages]
        if self.elsewhere:
            return StagedSession([self.elsewhere(self, sizes[:-1]), self.model(role, sizes[-1])], sizes[-2:], whole)
        places = [self.others.get(home, self) for home in self.build.homes]
        check_stages([place.device for place in places], stages, self.manifest.models[role].precision, whole)
        opened = [place.model(role, each) for place, each in zip(places, sizes, strict=True)]
        return StagedSession(opened, sizes, whole)

    def sessions(self, batch: int) -> dict[str, Session]:
        """Return a session for every model, by role. On a CPU they load in parallel, because kernels use one thread to reorder
        weights."""
        roles = self.manifest.roles
        if isinstance(self.device, Cpu):
            with ThreadPoolExecutor(len(roles)) as pool:
                loaded = dict(zip(roles, pool.map(lambda role: self.session(role, batch), roles), strict=True))
        else:
            loaded = {role: self.session(role, batch) for role in roles}
        for session in [each for each in loaded.values() if each.reads_features]:
            session.share_features(loaded["target"])
        return loaded

    @abstractmethod
    def sampler(self, name: str) -> Engine:
        """Return one of `contract.SAMPLERS`.

        Raises:
            EngineError: the backend refuses it, or it does not match the manifest.
        """

    def unrounded(self) -> Engines | None:
        """Return engines whose products do not round activations, for comparisons; None if rounding cannot be turned off."""
        return self

    def sizes(self, role: str, batch: int) -> Sizes:
        """Return the sizes of the session of one of `ROLES`."""
        model, build = self.manifest.models[role], self.build
        return Sizes(
            model.layers,
            model.vocab_rows,
            build.capacity,
            build.windows,
            max(build.max_prompt_chunk, *round_rows(role, build.k)),
            batch,
            features=model.features,
            reads_features=role in READS_FEATURES,
            mask_token=model.mask_token or 0,
            from_anchor=model.from_anchor,
            block_state=model.block_state,
            recurrent=model.recurrent,
            recent=recent_rows(model.recurrent, max(build.k)),
        )

    def prepare(self, sessions: Mapping[str, Session], progress: Progress) -> None:  # noqa: B027  # most need nothing
        """Do work that would delay the first requests, such as compiling kernels for the shapes of rounds."""


class GraphEngines(Engines):
    """Engines whose step models are graphs over bound buffers, which all use `GraphSession`."""

    @abstractmethod
    def step_model(self, role: str, stage: Stage | None = None) -> Engine:
        """Return the graph of one of `ROLES`, or of its stage.

        Raises:
            EngineError: the backend refuses it, or it does not match the manifest.
        """

    def model(self, role: str, sizes: Sizes) -> Session:
        return GraphSession(self.device, self.step_model(role, sizes.stage), self.manifest.models[role].precision, sizes)


class Backend(ABC):
    """One way to build a bundle's engines and to run them.

    `registry.register` adds an instance to the registry, where commands, builder, bundle checks and audit find it.
    Constructing an instance and reading its attributes must not import the backend's package.
    """

    name: str  # in `--backend` and in the manifest
    extra: str | None = None  # outrider's extra that installs the backend's package
    devices: tuple[str, ...] = ()  # the values of `--device` for building and calibrating
    numbered: tuple[str, ...] = ()  # those of `devices` of which a machine may have several: cuda:0, cuda:1
    options: tuple[Option, ...] = ()  # its options of `build-engine`
    cuts = False  # whether it builds and runs targets that are cut into stages
    requires_costs = True  # False if a bundle may be built on a machine that cannot run it, and calibrated later

    @abstractmethod
    def build(self, spec: BuildSpec, folder: Path, progress: Progress) -> Build:
        """Write the engines, and every file of the export that the bundle needs, into `folder`.

        Returns:
            `spec.result(...)`. Costs and acceptance are measured afterwards, by opening what was built.

        Raises:
            UsageError: an option, the device or a size is out of range.
            FolderError: the export is damaged, or there is no room.
            EngineError: the backend is not installed, or refuses a model.
        """

    def build_stages(self, spec: BuildSpec, folder: Path, build: Build, progress: Progress) -> StageBackend:
        """Write this backend's stages of a target whose other stages have other backends; only if it `cuts`.

        The whole target is compared with the export afterwards, when all stages have been written.

        Args:
            build: as the backend sees it, see `Build.seen_by`.

        Raises:
            EngineError: the backend is not installed, or refuses a stage.
        """
        raise NotImplementedError

    @abstractmethod
    def open(self, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        """Return a bundle's engines.

        Args:
            device: one of `devices`; None is the device that the bundle was built for.

        Raises:
            UsageError: the backend does not run on that device.
            DeviceError: this machine does not have the device.
            EngineError: the backend is not installed, or refuses the bundle.
        """

    def has(self, device: str) -> bool:
        """Return whether stages may run on a device: one of `devices`, or cuda:1."""
        kind, colon, number = device.partition(":")
        return kind in self.devices and (not colon or (kind in self.numbered and number.isdecimal()))

    @abstractmethod
    def engine_files(self, name: str) -> tuple[str, ...]:
        """Return the paths inside a bundle of the files of one of `ENGINES`."""

    def check(self, manifest: Manifest, build: Build) -> None:
        """Check that a manifest lists what the backend needs: files and costs, and more in subclasses.

        Raises:
            FolderError: something is missing.
        """
        self.check_stages(build)
        if build.draft_device is not None and not self.has(build.draft_device):
            raise damaged(f"{self.name} has no device {build.draft_device!r} for drafts - at `$.build.draft_device`")
        whole = [name for name in manifest.engines if not build.stages_of(name)]
        required = {TOKENIZER, *(file for name in whole for file in self.engine_files(name))}
        required |= {each for stage in build.stages for path in [step_file("target", stage)] for each in (path, path + WEIGHTS)}
        if missing := sorted(required - manifest.files.keys()):
            raise damaged(f"it does not list {missing[0]}")
        if build.costs or self.requires_costs:
            check_costs(manifest, build)

    def check_stages(self, build: Build) -> None:
        """Check that the backend runs its stages of a build, which it sees as its own.

        Raises:
            FolderError: it does not.
        """
        if build.stages and not self.cuts:
            raise damaged(f"it has stages, and {self.name} runs none - at `$.build.stages`")
        for stage, place in zip(build.stages, build.places, strict=False):
            if stage.backend is None and stage.device is not None and not self.has(stage.device):
                raise damaged(f"{self.name} has no device {place!r} for stages - at `$.build.stages`")
            if stage.threads is not None and place != "cpu":
                raise damaged(f"{place} has no threads - at `$.build.stages`")


def check_costs(manifest: Manifest, build: Build) -> None:
    """Check that a build has the cost of every pass that its rounds may run.

    Raises:
        FolderError: some are missing.
    """
    for name in manifest.engines:
        measured = {(cost.window, cost.rows) for cost in build.costs.get(name, []) if cost.batch == 1}
        rows = required_rows(name, build)
        windows = build.windows if name in ROLES else [0]
        required = {(window, each) for window in windows for each in rows if each <= window or name not in ROLES}
        if not required <= measured:
            raise damaged(f"costs of the {name} are missing - at `$.build.costs`")


def required_rows(name: str, build: Build) -> set[int]:
    """Return the row counts that rounds run one of `ENGINES` with."""
    if name in (*DRAFT_SAMPLERS, MARKOV):
        return {1}
    return {*round_rows(name, build.k)} if name in ROLES else {1, *(k + 1 for k in build.k)}


def import_package(module: str, extra: str) -> Any:
    """Import the package that a backend runs on, and return its module.

    Args:
        extra: outrider's extra that installs it.

    Raises:
        EngineError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # an OSError if one of the package's libraries is missing
        raise EngineError(f"{module} cannot be imported: {error}", f"pip install 'outrider[{extra}]'") from error
