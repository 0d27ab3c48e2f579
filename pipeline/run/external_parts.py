"""Finds, installs and checks the classes and functions of a user's modules that a job file names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from actors.checks import FUNCTION as CHECK
from configs.contexts import FullContextConfig
from configs.drafters import ModelDrafterConfig
from configs.load import ConfigError
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig
from configs.section import ExternalPartConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig
from files.external_code import ExternalCode, ExternalCodeError, find, install, is_external

if TYPE_CHECKING:
    from decoding.conformance.suite import Suite

METRIC = "audit.metric"
"""Its digest is recorded, but outputs with another one are resumed: a metric changes no generated token."""


def parts_of(methods: Mapping[str, MethodConfig]) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the name of every external part of methods."""
    for where, method in methods.items():
        for name in ("drafter", "tree", "acceptance"):
            if isinstance(part := getattr(method, name), ExternalPartConfig):
                yield f"{where}.{name}", part.kind


def external_names(config: CaptionJobConfig | SynthesizeJobConfig | TrainDrafterJobConfig) -> dict[str, str]:
    """Return the names of all external code of a job by dotted path."""
    names = {} if isinstance(config, TrainDrafterJobConfig) else dict(parts_of(config.method.places))
    if is_external(config.source.kind):
        names["source.kind"] = config.source.kind
    if isinstance(config, CaptionJobConfig) and config.audit is not None and is_external(config.audit.metric):
        names[METRIC] = config.audit.metric
    if isinstance(config, CaptionJobConfig) and config.checks is not None and config.checks.python is not None:
        names[CHECK] = config.checks.python
    return names


def find_external(names: Mapping[str, str], folder: Path | None) -> dict[str, ExternalCode]:
    """Find external code by dotted path: beside the job file, whose folder is `folder`, in the working directory, and
    among installed modules. Raises ConfigError."""
    folders = [*([folder] if folder is not None else []), Path.cwd()]
    codes = {}
    for where, name in names.items():
        try:
            codes[where] = find([name], folders)
        except ExternalCodeError as error:
            raise ConfigError(f"{where}: {name}: {error}") from None
    return codes


def archived(names: Mapping[str, str], folder: Path | None) -> dict[str, bytes]:
    """Return the shipped files of external code by path relative to the folder that they are imported from, for an
    archive. Raises ConfigError."""
    files = [file for code in find_external(names, folder).values() for file in code.files.values() if file.path]
    return {f"{file.module.replace('.', '/')}{'/__init__' if file.is_package else ''}.py": file.text for file in files}


def install_external(names: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """Find external code as `find_external`, import it from its recorded text in this process and in the workers that
    it starts, and return name and SHA-256 by dotted path. Raises ConfigError."""
    codes = find_external(names, folder)
    for code in codes.values():
        install(code.files)
    return {where: f"{name} sha256:{digest}" for where, code in codes.items() for name, digest in code.digests.items()}


def install_recorded(
    config: CaptionJobConfig | SynthesizeJobConfig, source_code: str, check_code: str = ""
) -> None:
    """Install the external code of a recorded configuration, looked up in the working directory first. Raises
    ConfigError if it cannot be found, or if the code of its source is not `source_code`, or that of its check not
    `check_code`, which made the output."""
    installed = install_external(external_names(config), None)
    for where, recorded in (("source.kind", source_code), (CHECK, check_code)):
        if (now := installed.get(where, "")) != recorded:
            raise ConfigError(f"{where}: the output was made by {recorded}, and now it is {now}; restore it")


def suite_of(method: MethodConfig) -> Suite:
    """Return the checks of a method on the toy target. A drafter with weights is replaced by a toy model. Raises
    ConfigError if a part cannot be made."""
    from actors.loading.method import build_method
    from decoding.conformance import toys
    from decoding.conformance.suite import Suite

    needs_model = method.needs_checkpoint or method.needs_mtp
    if needs_model:
        method = method.model_copy(update={"drafter": ModelDrafterConfig(), "contexts": (FullContextConfig(),)})
    model = toys.similar() if needs_model else None
    suite = Suite(
        lambda target: build_method(method, model, target), (lambda prefix: [prefix]) if needs_model else None
    )
    suite.make_method()
    return suite


def check_contracts(methods: Mapping[str, MethodConfig]) -> None:
    """Run the quick checks of the methods with external parts on a small random target. Raises ConfigError for the
    first deviation."""
    for where, method in methods.items():
        if not (names := ", ".join(name for _, name in parts_of({where: method}))):
            continue
        from decoding.conformance.suite import QUICK, run

        for result in run(suite_of(method), QUICK):
            if result.problem:
                raise ConfigError(
                    f"{where}: {names} fails the check {result.name!r} on a small random target: {result.problem}; "
                    "check-method runs all checks"
                )
