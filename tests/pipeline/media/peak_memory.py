"""A program of its own: reads, cuts and decodes a source as the job's tasks do, and prints the peaks of its memory.

    python -m tests.pipeline.media.peak_memory SOURCE_JSON BATCH_ROWS

Prints one JSON object: `base` and `peak` are bytes of this process (before and after), `child` the peak of the
decoders' process, `tasks` the rows of each decoding task, and `codes` the error codes of all rows in order.
"""

from __future__ import annotations

import gc
import json
import resource
import sys

import pyarrow as pa

from actors.media import without_fillers
from configs.schema import Prompt
from configs.source import Source
from pipeline.media import image_decoding
from pipeline.media.row_weights import Weigher
from pipeline.media.video import clips
from pipeline.prompts.row_options import PromptOptions
from pipeline.source.datasource import SpanDatasource
from pipeline.source.manifest import freeze


def peak_bytes(who: int = resource.RUSAGE_SELF) -> int:
    return 1024 * resource.getrusage(who).ru_maxrss


def main() -> None:
    source, batch_rows = Source.model_validate_json(sys.argv[1]), int(sys.argv[2])
    prompt_options = PromptOptions(Prompt(text="What?"))
    frozen = freeze(source, prompt_options)
    options = image_decoding.DecodeOptions.of(source, frozen.root, prompt_options)
    weigher = Weigher.of(source, batch_rows, prompt_options)
    pa.set_memory_pool(pa.system_memory_pool())
    base = peak_bytes()
    tasks, codes = [], []
    for task in SpanDatasource(source, frozen).get_read_tasks(1):
        [table] = task()
        padded = weigher.with_fillers(table)
        del table
        for start in range(0, padded.num_rows, batch_rows):  # as Ray's cut, which counts rows alone
            batch = without_fillers(padded.slice(start, batch_rows))
            decoded = image_decoding.decode_table(batch, options)
            tasks.append(batch.num_rows)
            codes += decoded["error_type"].to_pylist()
            copy = pa.BufferOutputStream()  # as Ray's copy into its store
            with pa.ipc.new_stream(copy, decoded.schema) as stream:
                stream.write_table(decoded)
            del decoded, stream, copy
            gc.collect()
    peak = peak_bytes()
    clips.close_worker()
    child = peak_bytes(resource.RUSAGE_CHILDREN)
    print(json.dumps({"base": base, "peak": peak, "child": child, "tasks": tasks, "codes": codes}))


if __name__ == "__main__":
    main()
