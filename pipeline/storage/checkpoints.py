"""Resolves a job's checkpoints: the driver pins and checks revisions, actors copy weights from object stores.

Loaders support folders and hub ids only, so functions here return the job with paths or revisions replaced. Result rows
and records name the paths of the original job and the pinned revisions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from actors import engine_actor, paint
from configs.contexts import CaptionContextConfig
from configs.load import ConfigError
from configs.schema import CaptionJobConfig, WeightsConfig
from configs.section import Section
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig
from files.installation import IS_INSTALLED, SHIPPED_MODELS, shipped_model, shipped_models
from files.plurals import counted
from pipeline.storage import access, checkpoint_cache
from pipeline.storage.checkpoint_cache import StoredCheckpoint
from pipeline.storage.first_touch import bounded, check_stores

if TYPE_CHECKING:
    from actors.loading.image_pair import VqPainter

AnyJob = TypeVar("AnyJob", bound=Section)
Info = TypeVar("Info")

HUB_TIMEOUT_S = 5.0
"""Longest time of the requests to the hub for one checkpoint; without an answer, a job needs the local cache of the hub
client."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+")


@dataclasses.dataclass(frozen=True)
class Site:
    """One checkpoint of a job: its key in `revisions`, its dotted path in the job file as `steps`, and its section."""

    name: str
    steps: tuple[str, ...]
    section: WeightsConfig | CaptionContextConfig

    @property
    def where(self) -> str:
        return ".".join(self.steps)

    @property
    def is_stored(self) -> bool:
        return bool(access.uri_scheme(self.section.path))

    @property
    def is_on_hub(self) -> bool:
        """Whether the path is a hub id (`owner/name`) and no local path."""
        return bool(_HUB_ID.fullmatch(self.section.path)) and not os.path.exists(self.section.path)

    @property
    def shipped(self) -> Path | None:
        """The folder of a model that ships with this code, unless the path exists in the working directory."""
        return None if os.path.exists(self.section.path) else shipped_model(self.section.path)

    @property
    def is_left_out(self) -> bool:
        """Whether the path is that of a model of the checkout that the installed package does not have."""
        path = self.section.path
        return IS_INSTALLED and path.startswith(f"{SHIPPED_MODELS}/") and not os.path.exists(path)

    def refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.section.path}: {reason}")

    def look(self) -> StoredCheckpoint:
        """List the checkpoint in its store; ConfigError if that fails or its revision is not the configured one."""
        with_code = bool(getattr(self.section, "allow_remote_code", False))
        checkpoint = checkpoint_cache.look(self.section.path, self.where, with_code)
        if self.section.revision not in (None, checkpoint.revision):
            raise checkpoint.refusal(
                f"it is revision {checkpoint.revision} now, and {self.where}.revision asks for "
                f"{self.section.revision}; its files were changed, or the hash belongs to another checkpoint"
            )
        return checkpoint


@dataclasses.dataclass(frozen=True)
class CheckpointRevisions:
    """Result of the checkpoint check for jobs that load no pair of target and drafter."""

    revisions: dict[str, str]


def sites(job: Section) -> Iterator[Site]:
    """Yield the checkpoints that a job loads."""
    if isinstance(job, TrainDrafterJobConfig):
        yield Site("target", ("target",), job.target)
        for name in ("vq", "condition"):
            if job.image is not None and getattr(job.image, name) is not None:
                yield Site(name, ("image", name), getattr(job.image, name))
        return
    assert isinstance(job, CaptionJobConfig | SynthesizeJobConfig), type(job)
    for name, weights in job.model:
        if weights is not None and (name != "drafter" or job.method.needs_checkpoint):
            yield Site(name, ("model", name), weights)
    for index, context in enumerate(job.method.contexts):
        if isinstance(context, CaptionContextConfig):
            yield Site(f"captioner_{index}", ("method", "contexts", str(index)), context)


def replaced(part: Any, steps: Sequence[str], changes: dict[str, Any]) -> Any:
    """Return the job with `changes` applied to the section at the path `steps`."""
    if not steps:
        return part.model_copy(update=changes)
    step, *rest = steps
    if isinstance(part, tuple):
        index = int(step)
        return (*part[:index], replaced(part[index], rest, changes), *part[index + 1 :])
    return part.model_copy(update={step: replaced(getattr(part, step), rest, changes)})


def _at_path(job: Any, site: Site, path: Path) -> Any:
    return replaced(job, site.steps, {"path": str(path), "revision": None})


def check(job: AnyJob, inspect: Callable[[AnyJob], Info], runs_here: bool) -> tuple[AnyJob, Info]:
    """Return the job with all revisions pinned, and the result of `inspect` on its checkpoints; reads settings and
    headers, but no weights. With `runs_here`, actors run on this machine, and its free disk space is checked.
    ConfigError if a checkpoint is missing, refused, damaged, of another revision, or does not fit."""
    from models.loading.hub import offline

    outlined = job
    is_unreachable = False
    for site in sites(job):
        if site.is_stored:
            check_stores(site.where, [site.section.path])
            checkpoint = site.look()
            if runs_here:
                checkpoint_cache.check_disk(checkpoint)
            job = replaced(job, site.steps, {"revision": checkpoint.revision})
            outlined = _at_path(outlined, site, checkpoint_cache.outline(checkpoint))
            _report(site, len(checkpoint.files), checkpoint.num_bytes, checkpoint.revision)
        elif site.shipped is not None:
            outlined = _at_path(outlined, site, site.shipped)
        elif site.is_left_out:
            raise site.refusal(
                f"this model is part of a checkout only; the installed package has {', '.join(shipped_models())}"
            )
        elif site.is_on_hub:
            commit = None if is_unreachable else _query_hub(site)
            if commit is None:  # no further requests: each would wait for the library's own retries
                is_unreachable = True
                continue
            job = replaced(job, site.steps, {"revision": commit})
            outlined = replaced(outlined, site.steps, {"revision": commit})
    with offline() if is_unreachable else contextlib.nullcontext():
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
        if os.path.exists(site.section.path) or site.shipped is not None:
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
    size = f"{counted(num_files, 'file')}, {num_bytes / 1e9:,.3f} GB"
    print(f"weights  {site.where}: {path}, {size}, revision {revision}")


def _query_hub(site: Site) -> str | None:
    """Return the commit of a hub id; None if the hub does not answer. ConfigError if the repository or revision does
    not exist, is not accessible to this user, or has invalid safetensors files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    path, revision = site.section.path, site.section.revision

    def ask() -> tuple[str, dict[str, int], list[str]]:
        api = HfApi()
        info = api.model_info(path, revision=revision, timeout=HUB_TIMEOUT_S, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        weights = [name for name in sizes if name.endswith(checkpoint_cache.WEIGHT_SUFFIXES) and "/" not in name]
        if weights:  # of a gated repository, everybody may read the facts, and not the files
            api.parse_safetensors_file_metadata(path, min(weights), revision=info.sha)
        return str(info.sha), sizes, weights

    try:
        commit, sizes, weights = bounded(ask, HUB_TIMEOUT_S)  # the client retries, and resolves names without a limit
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
        return None  # HF_HUB_OFFLINE is set or the hub does not answer: the local cache is used
    _report(site, len(sizes), sum(sizes[name] for name in weights), commit)
    return commit


def _refuse_uncached(site: Site) -> None:
    """Raise ConfigError if the hub does not answer and the local cache has no configuration of the hub id."""
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


def fetched(job: AnyJob) -> AnyJob:
    """Copy stored weights to this machine, and return the job with local paths of these and of shipped models;
    ConfigError if that fails."""
    for site in sites(job):
        if site.is_stored:
            job = _at_path(job, site, checkpoint_cache.copy(site.look()))
        elif site.shipped is not None:
            job = _at_path(job, site, site.shipped)
    return job


def load_pair(config: Any, num_threads: int | None) -> Any:
    """Call `actors.engine_actor.load_pair` after copying stored weights to this machine."""
    local = fetched(config)
    loaded = _with_job_names(config, local, lambda: engine_actor.load_pair(local, num_threads))
    return _renamed(loaded, config)


def load_painter(config: SynthesizeJobConfig, num_threads: int | None) -> VqPainter:
    """Call `actors.paint.load_painter`; copies the VQ model from its store, and only an outline of the target."""
    local = config
    for site in sites(config):
        if site.is_stored and site.name in ("vq", "target"):
            checkpoint = site.look()
            path = checkpoint_cache.copy(checkpoint) if site.name == "vq" else checkpoint_cache.outline(checkpoint)
            local = _at_path(local, site, path)
        elif site.shipped is not None:
            local = _at_path(local, site, site.shipped)
    return _with_job_names(config, local, lambda: paint.load_painter(local, num_threads))


def _with_job_names(job: Section, local: Section, act: Callable[[], Info]) -> Info:
    """Call `act`; in its ConfigError, paths of local copies are replaced by the job's URLs."""
    try:
        return act()
    except ConfigError as error:
        message = str(error)
        for site, local_site in zip(sites(job), sites(local), strict=True):
            if site.section.path != local_site.section.path:
                message = message.replace(local_site.section.path, access.shown(site.section.path))
        raise ConfigError(message) from None


def _renamed(pair: Any, job: Section) -> Any:
    """Replace the revisions and model ids of a pair, or of its `info`, by the job's own paths and pinned revisions."""
    stored = {site.name: site for site in sites(job) if site.is_stored or site.shipped is not None}
    if not stored:
        return pair
    if hasattr(pair, "info"):  # image pairs have their revisions and ids in `info`
        return dataclasses.replace(pair, info=_renamed(pair.info, job))
    revisions = {name: str(site.section.revision) for name, site in stored.items() if site.is_stored}
    changes: dict[str, Any] = {"revisions": {**pair.revisions, **revisions}}
    for name in ("target", "drafter"):
        if name in stored and hasattr(pair, f"{name}_id"):
            changes[f"{name}_id"] = f"{stored[name].section.path}@{changes['revisions'][name]}"
    return dataclasses.replace(pair, **changes)
