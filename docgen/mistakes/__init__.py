"""Lists mistakes in jobs and the refusals that answer them: the one table for the reference page and for the test that
makes every mistake. `{folder}` is the folder of the example, which has the source `in`, the job file and the output."""

from __future__ import annotations

from docgen.mistakes.keys import KEYS, LENGTHS, VALUES
from docgen.mistakes.places import GPUS, MODELS, OUTPUTS, SOURCES

GROUPS = {
    "Keys": KEYS,
    "Values": VALUES,
    "Lengths and memory": LENGTHS,
    "GPUs, CPUs and clusters": GPUS,
    "Outputs": OUTPUTS,
    "Sources and stores": SOURCES,
    "Models": MODELS,
}
MISTAKES = {mistake.name: mistake for group in GROUPS.values() for mistake in group}
