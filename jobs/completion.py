"""`python -m jobs.completion SHELL`: print the completion script of `draftfleet` for bash or zsh.

    source <(draftfleet completion bash)     # in ~/.bashrc
    source <(draftfleet completion zsh)      # in ~/.zshrc, after compinit

The script completes commands, options, names of job files, and the keys of job files, without starting Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from configs.output import ExportJobConfig
from configs.presets import job_names
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig
from jobs.cli import COMMANDS, module_of
from jobs.terminal.arguments import new_parser

SHELLS = ("bash", "zsh")
MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "caption": (CaptionJobConfig,),
    "synthesize": (SynthesizeJobConfig,),
    "estimate": (CaptionJobConfig, SynthesizeJobConfig),
    "compare": (CaptionJobConfig, SynthesizeJobConfig),
    "verify": (CaptionJobConfig, SynthesizeJobConfig),
    "export": (ExportJobConfig,),
    "check-method": (CaptionJobConfig,),
    "submit": (CaptionJobConfig, SynthesizeJobConfig, TrainDrafterJobConfig),
    "train-drafter": (TrainDrafterJobConfig,),
}
"""Job files whose keys a command takes as overrides."""
MAX_DEPTH = 6
"""Maximum number of names in a completed key."""

BASH = """\
# Completion of draftfleet for bash.
_draftfleet() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    COMPREPLY=()
    # Bash splits words at `=`; what follows it is a value, which may be a file.
    [[ "$current" == "=" || "${{COMP_WORDS[COMP_CWORD-1]}}" == "=" ]] && return
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ ${{#COMPREPLY[@]}} -eq 1 && "${{COMPREPLY[0]}}" == *= ]]; then compopt -o nospace; fi
}}
complete -o default -F _draftfleet draftfleet
"""
ZSH = """\
#compdef draftfleet
# Completion of draftfleet for zsh.
_draftfleet() {{
    local -a words_of keys_of
    if (( CURRENT == 2 )); then
        words_of=({commands})
        compadd -a words_of
        return
    fi
    if [[ "$PREFIX" == *=* ]]; then
        compset -P '*='
        _files
        return
    fi
    case "$words[2]" in
{cases}
    esac
    compadd -a words_of
    compadd -S '' -a keys_of
    _files
}}
compdef _draftfleet draftfleet
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("completion", __doc__ or "", "bash > ~/.local/share/bash-completion/completions/draftfleet")
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script and return 0."""
    print(script(parser().parse_args(argv).shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the completion script of a shell of `SHELLS`."""
    cases = []
    for name in COMMANDS:
        known = module_of(name).parser()
        words = [option for action in known._actions for option in action.option_strings]  # argparse has no public list
        words += [choice for action in known._actions if not action.option_strings for choice in action.choices or ()]
        words += job_names() if any(action.dest == "job_file" for action in known._actions) else []
        keys = sorted({f"{key}=" for model in MODELS.get(name, ()) for key in keys_of(model)})
        if shell == "bash":
            cases.append(f'            {name}) words="{" ".join([*words, *keys])}" ;;')
        else:
            cases.append(f"        {name}) words_of=({' '.join(words)}); keys_of=({' '.join(keys)}) ;;")
    template = BASH if shell == "bash" else ZSH
    return template.format(commands=" ".join([*COMMANDS, "--help", "--version"]), cases="\n".join(cases))


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted keys of a job file, sections included, such as `method` and `method.drafter.kind`."""
    schema = model.model_json_schema()
    yield from dict.fromkeys(_keys(schema, schema.get("$defs", {}), ()))


def _keys(node: dict[str, Any], known: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if "$ref" in node:
        node = known[node["$ref"].rpartition("/")[2]]
    for choice in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _keys(choice, known, path)
    if len(path) < MAX_DEPTH:
        for name, inner in node.get("properties", {}).items():
            yield ".".join((*path, name))
            yield from _keys(inner, known, (*path, name))


if __name__ == "__main__":
    sys.exit(main())
