"""`python -m jobs.check_method JOB`: check a method, and the classes of yours that it names, on a small random model.

The file is a job file, or one with a section `method` alone. Checks compare tokens with those of transformers'
`generate` and of a reference, and what every part returns with its interface. Exit status: 0 if all checks pass, 1 if
one fails, 2 if the file is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.load import ConfigError, apply_override, validate
from configs.method import MethodConfig
from configs.presets import find_job, resolve_methods
from configs.yaml_file import read_yaml
from files.external_code import is_external
from jobs.terminal.arguments import add_job_file, new_parser, take_job_file
from jobs.terminal.exit_status import DONE, FAILED, REFUSED
from pipeline.run.external_parts import install_external, parts_of, suite_of


class _File(BaseModel):
    """A file with a method; its other sections are not read."""

    method: MethodConfig = MethodConfig()


def main(argv: Sequence[str] | None = None) -> int:
    """Check the methods of a file and return the exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        data, methods = read_methods(arguments.config, arguments.overrides)
        for name in names_not_checked(data):
            print(f"not checked here: {name}; `--dry-run` of the job checks it")
        install_external(dict(parts_of(methods)), arguments.config.parent)
        passed = [check(where, method) for where, method in methods.items()]
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    return DONE if all(passed) else FAILED


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("check-method", __doc__ or "", "my_method.yaml method.tree.length=3")
    add_job_file(parser, "a job file, or a file with a section method; or the name of a shipped job file")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with status 2 if it is invalid."""
    known = parser()
    return take_job_file(known, known.parse_intermixed_args(argv))


def read_methods(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, MethodConfig]]:
    """Return the data of a file, and its methods by dotted path: one, or the candidates of `auto`. Raises
    ConfigError."""
    path, defaults = find_job(path)
    data = read_yaml(path)
    for override in (*(default for default in defaults if default.startswith("method")), *overrides):
        if not override.startswith(("method.", "method=")):
            raise ConfigError(f"override {override!r}: only values of the section method are taken")
        resolve_methods(data, str(path))
        apply_override(data, override)
    resolve_methods(data, str(path))
    if "method" not in data:
        raise ConfigError(f"{path}: method: is required")
    return data, validate(_File, {"method": data["method"]}, str(path)).method.places


def names_not_checked(data: dict[str, Any]) -> Iterator[str]:
    """Yield the external code of a job file that is no part of a method, as `dotted path name`."""
    for section, key in (("source", "kind"), ("audit", "metric"), ("checks", "python")):
        values = data.get(section)
        if isinstance(values, dict) and is_external(str(values.get(key))):
            yield f"{section}.{key} {values[key]}"


def check(where: str, method: MethodConfig) -> bool:
    """Run all checks of a method, print a line for each, and return whether all passed."""
    from decoding.conformance.suite import ALL, run  # imports torch and transformers, after the fast checks

    suite = suite_of(method)
    print(f"{where}: {method.label}, {method.verify_mode}", flush=True)
    results = run(suite, ALL)
    for result in results:
        detail = result.problem or result.note
        print(f"  {'FAILED' if result.problem else 'passed'}  {result.name}{f': {detail}' if detail else ''}")
    return not any(result.problem for result in results)


if __name__ == "__main__":
    sys.exit(main())
