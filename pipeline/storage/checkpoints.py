"""Sources of a job's weights: pinned and checked on the driver, copied to the machine of each actor.

A checkpoint is a folder that every machine sees, a hub id, or a URL of an object store. Loaders support folders and hub
ids; so each function here takes a job and returns the same job with other paths or revisions. The identities in rows
and records are those of the original job, pinned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import actors.engine_actor
import actors.paint
from configs.contexts import CaptionContext
from configs.load import ConfigError
from configs.schema import CaptionJob, Weights
from configs.section import Section
from configs.synthesis import SynthesizeJob
from configs.training import TrainDrafterJob
from pipeline.storage import access, checkpoint_cache
from pipeline.storage.checkpoint_cache import StoredCheckpoint

if TYPE_CHECKING:
    from actors.loading.image_pair import ImagePair, VqPainter
    from actors.loading.pair import Pair

AnyJob = TypeVar("AnyJob", bound=Section)
Info = TypeVar("Info")

HUB_TIMEOUT_S = 8.0
"""Seconds for one answer of the hub; without one, a job uses this machine's cache, or is refused."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+")


@dataclasses.dataclass(frozen=True)
class Site:
    """One checkpoint of a job: its name among the revisions, its path in the job file, and its section."""

    name: str
    steps: tuple[str, ...]
    section: Weights | CaptionContext

    @property
    def where(self) -> str:
        return ".".join(self.steps)

    @property
    def is_stored(self) -> bool:
        """Whether it is read from an object store."""
        return bool(access.uri_scheme(self.section.path))

    @property
    def is_on_hub(self) -> bool:
        """Whether it is a hub id, of a whole repository."""
        return bool(_HUB_ID.fullmatch(self.section.path)) and not os.path.exists(self.section.path)

    def refusal(self, reason: str) -> ConfigError:
        """An error under the dotted path, the checkpoint's path first."""
        return ConfigError(f"{self.where}: {self.section.path}: {reason}")

    def look(self) -> StoredCheckpoint:
        """List it in its store; ConfigError if that fails, or if it is not the revision that the job asks for."""
        with_code = bool(getattr(self.section, "allow_remote_code", False))
        checkpoint = checkpoint_cache.look(self.section.path, self.where, with_code)
        if self.section.revision not in (None, checkpoint.revision):
            raise checkpoint.refusal(
                f"it is revision {checkpoint.revision} now, and {self.where}.revision asks for "
                f"{self.section.revision}; its files were changed, or the hash belongs to another checkpoint"
            )
        return checkpoint


@dataclasses.dataclass(frozen=True)
class Known:
    """Result of the checkpoint check for jobs without a pair."""

    revisions: dict[str, str]


def sites(job: Section) -> Iterator[Site]:
    """The checkpoints that a job loads."""
    if isinstance(job, TrainDrafterJob):
        yield Site("target", ("target",), job.target)
        for name in ("vq", "condition"):
            if job.image is not None and getattr(job.image, name) is not None:
                yield Site(name, ("image", name), getattr(job.image, name))
        return
    assert isinstance(job, CaptionJob | SynthesizeJob), type(job)
    for name, weights in job.model:
        if weights is not None and (name != "drafter" or job.method.needs_checkpoint):
            yield Site(name, ("model", name), weights)
    for index, context in enumerate(job.method.contexts):
        if isinstance(context, CaptionContext):
            yield Site(f"captioner_{index}", ("method", "contexts", str(index)), context)


def replaced(part: Any, steps: Sequence[str], changes: dict[str, Any]) -> Any:
    """The job with some fields of the section at this path changed."""
    if not steps:
        return part.model_copy(update=changes)
    step, *rest = steps
    if isinstance(part, tuple):
        index = int(step)
        return (*part[:index], replaced(part[index], rest, changes), *part[index + 1 :])
    return part.model_copy(update={step: replaced(getattr(part, step), rest, changes)})


# --- on the driver -------------------------------------------------------------------------------------------------


def check(job: AnyJob, inspect: Callable[[AnyJob], Info], runs_here: bool) -> tuple[AnyJob, Info]:
    """The job with every revision pinned, and the result of `look_at` on its checkpoints without reading weights.

    In a store the files are listed, settings and headers read; the hub returns the commit. `runs_here` means that
    actors share this machine, whose disk is then checked too.

    Raises:
        ConfigError: a checkpoint is missing, refused, damaged, of another revision, or does not fit.
    """
    outlined = job
    is_unreachable = False
    for site in sites(job):
        if site.is_stored:
            checkpoint = site.look()
            if runs_here:
                checkpoint_cache.check_disk(checkpoint)
            job = replaced(job, site.steps, {"revision": checkpoint.revision})
            outlined = replaced(
                outlined, site.steps, {"path": str(checkpoint_cache.outline(checkpoint)), "revision": None}
            )
            _report(site, len(checkpoint.files), checkpoint.num_bytes, checkpoint.revision)
        elif site.is_on_hub:
            commit = None if is_unreachable else _query_hub(site)
            if commit is None:  # the hub is not asked again: each request would wait for the library's own retries
                is_unreachable = True
                continue
            job = replaced(job, site.steps, {"revision": commit})
            outlined = replaced(outlined, site.steps, {"revision": commit})
    with _offline() if is_unreachable else contextlib.nullcontext():
        try:
            info = _with_job_names(job, outlined, lambda: inspect(outlined))
        except ConfigError:
            for site in sites(outlined):
                if is_unreachable and site.is_on_hub:
                    _refuse_uncached(site)
            raise
    for site in sites(job):
        found_revision, wanted = getattr(info, "revisions", {}).get(site.name), site.section.revision
        if site.is_stored or found_revision is None:
            continue
        if os.path.exists(site.section.path):
            if wanted not in (None, found_revision):
                raise site.refusal(f"it is revision {found_revision}, and {site.where}.revision asks for {wanted}")
        elif _COMMIT.fullmatch(found_revision):
            job = replaced(job, site.steps, {"revision": found_revision})
        else:
            raise site.refusal(
                f"the commit of {wanted or 'its main branch'} cannot be determined: {_why_no_hub()}, and it is not in "
                f"the cache of this machine; give the commit in {site.where}.revision"
            )
    return job, _renamed(info, job)


def _report(site: Site, num_files: int, num_bytes: int, revision: str) -> None:
    path = access.shown(site.section.path)
    print(f"weights  {site.where}: {path}, {num_files} files, {num_bytes / 1e9:,.3f} GB, revision {revision}")


def _query_hub(site: Site) -> str | None:
    """The commit of a hub id; None if the hub does not answer. ConfigError if the repository or revision is absent, is
    not open to this user, or holds no weights."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    path, revision = site.section.path, site.section.revision
    try:
        api = HfApi()
        info = api.model_info(path, revision=revision, timeout=HUB_TIMEOUT_S, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        weights = [name for name in sizes if name.endswith(checkpoint_cache.WEIGHT_SUFFIXES) and "/" not in name]
        if weights:
            api.parse_safetensors_file_metadata(path, min(weights), revision=info.sha)
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise site.refusal(access.reason_of(error)) from None
    except Exception as error:  # the client raises errors of no common class
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            raise site.refusal(
                f"the hub answers {status}: there is no such repository or revision"
                f"{'' if revision is None else f' ({revision})'}, or it is not open to you; HF_TOKEN in the "
                "environment names you"
            ) from None
        return None  # HF_HUB_OFFLINE is set, or there is no answer: this machine's own cache is used, if it has one
    _report(site, len(sizes), sum(sizes[name] for name in weights), str(info.sha))
    return str(info.sha)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Have the hub's client read only what this machine has kept, as HF_HUB_OFFLINE does for a whole process."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _refuse_uncached(site: Site) -> None:
    """Raise ConfigError for a hub id without a cached configuration on this machine: the hub does not answer."""
    from huggingface_hub import try_to_load_from_cache

    path, revision = site.section.path, site.section.revision
    names = ("config.json", "adapter_config.json")
    if not any(isinstance(try_to_load_from_cache(path, name, revision=revision), str) for name in names):
        raise site.refusal(
            f"{_why_no_hub()}, and it is not in the cache of this machine; connect the machine to the hub, or name a "
            "folder that holds the checkpoint"
        )


def _why_no_hub() -> str:
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return "HF_HUB_OFFLINE is set" if is_offline else "the hub does not answer"


# --- in an actor's process -----------------------------------------------------------------------------------------


def fetched(job: AnyJob) -> AnyJob:
    """The job with the weights of stores copied to this machine, once for all of its processes.

    Raises:
        ConfigError: they cannot be read, were changed since the job was planned, or do not fit on the disk.
    """
    for site in sites(job):
        if site.is_stored:
            job = replaced(job, site.steps, {"path": str(checkpoint_cache.copy(site.look())), "revision": None})
    return job


def load_pair(config: CaptionJob, num_threads: int | None) -> Pair:
    """As `actors.engine_actor.load_pair`, from the location of the weights."""
    pair: Pair = _load(config, fetched(config), actors.engine_actor.load_pair, num_threads)
    return pair


def load_image_pair(config: SynthesizeJob, num_threads: int | None) -> ImagePair:
    """As `actors.engine_actor.load_pair`, from the location of the weights."""
    pair: ImagePair = _load(config, fetched(config), actors.engine_actor.load_pair, num_threads)
    return pair


def load_painter(config: SynthesizeJob, num_threads: int | None) -> VqPainter:
    """As `actors.paint.load_painter`; of all weights only those of the VQ model are copied."""
    local = config
    for site in sites(config):
        if site.is_stored and site.name in ("vq", "target"):
            checkpoint = site.look()
            path = checkpoint_cache.copy(checkpoint) if site.name == "vq" else checkpoint_cache.outline(checkpoint)
            local = replaced(local, site.steps, {"path": str(path), "revision": None})
    return _with_job_names(config, local, lambda: actors.paint.load_painter(local, num_threads))


def _load(job: AnyJob, local: AnyJob, load: Callable[[AnyJob, int | None], Info], num_threads: int | None) -> Info:
    loaded: Info = _renamed(_with_job_names(job, local, lambda: load(local, num_threads)), job)
    return loaded


def _with_job_names(job: Section, local: Section, act: Callable[[], Info]) -> Info:
    """The result of `act`; errors name the URLs of the job instead of the checked copies."""
    try:
        return act()
    except ConfigError as error:
        message = str(error)
        for site, local_site in zip(sites(job), sites(local), strict=True):
            if site.is_stored:
                message = message.replace(local_site.section.path, access.shown(site.section.path))
        raise ConfigError(message) from None


def _renamed(found: Any, job: Section) -> Any:
    """A pair, or the facts of one, with the identities of the job's own paths and revisions."""
    stored = {site.name: site for site in sites(job) if site.is_stored}
    if not stored:
        return found
    if hasattr(found, "info"):  # image pairs keep their facts together
        return dataclasses.replace(found, info=_renamed(found.info, job))
    revisions = {name: str(site.section.revision) for name, site in stored.items()}
    changes: dict[str, Any] = {"revisions": {**found.revisions, **revisions}}
    for name in ("target", "drafter"):
        if name in stored and hasattr(found, f"{name}_id"):
            changes[f"{name}_id"] = f"{stored[name].section.path}@{revisions[name]}"
    return dataclasses.replace(found, **changes)
