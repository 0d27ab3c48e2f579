"""A program of its own: reads, cuts and decodes a source as the job's tasks do, and prints the peaks of its memory.

    python -m tests.pipeline.media.peak_memory SOURCE_JSON BATCH_ROWS [processor]

With `processor`, tasks run that of Qwen2.5-VL, which is loaded before `base` is measured.
Prints one JSON object: `base` and `peak` are bytes of this process (before and after), `child` the peak of the
decoders' process, `tasks` the rows of each decoding task, `codes` the error codes of all rows in order, and
`processed` the number of rows with processor outputs.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from actors.media import without_fillers
from configs.schema import PromptConfig
from configs.source import SourceConfig
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.freezing import freeze
from pipeline.media import image_decoding, prompt_processor
from pipeline.media.prompt_processor import PromptProcessor
from pipeline.media.row_weights import Weigher, share_of
from pipeline.media.video import clips
from pipeline.prompts.row_options import PromptOptions

if TYPE_CHECKING:
    from models.inputs.output_size import OutputSizes


def peak_bytes(who: int = resource.RUSAGE_SELF) -> int:
    return 1024 * resource.getrusage(who).ru_maxrss


def in_tasks(source: SourceConfig, batch_rows: int) -> tuple[PromptProcessor, OutputSizes]:
    """A processor with the settings of Qwen2.5-VL and a zoo model's tokenizer, loaded; and the sizes of its outputs."""
    from transformers import Qwen2VLImageProcessorPil

    from models.inputs.output_size import OutputSizes
    from models.inputs.processing import FrontEnd
    from models.loading.checkpoints import CheckpointRef, read_config, read_processor

    ref = CheckpointRef("zoo/checkpoints/video_target")
    processor = read_processor(ref, read_config(ref))
    processor.image_processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056})
    front_end = FrontEnd(processor)
    prompt_processor._front_ends["peak"] = front_end
    sizes = OutputSizes.measure(front_end, 336)  # large pictures would raise `base`
    share = share_of(source.max_decoded_bytes)
    return PromptProcessor(bytes, "peak", False, sizes, share, batch_rows, None, 1), sizes


def main() -> None:
    source, batch_rows = SourceConfig.model_validate_json(sys.argv[1]), int(sys.argv[2])
    prompt_options = PromptOptions(PromptConfig(text="What?"))
    frozen = freeze(source, prompt_options)
    options = image_decoding.DecodeOptions.of(source, frozen.root, prompt_options)
    outputs: tuple[OutputSizes, bool] | tuple[()] = ()
    if sys.argv[3:] == ["processor"]:
        processor, sizes = in_tasks(source, batch_rows)
        options, outputs = replace(options, processor=processor), (sizes, False)
    weigher = Weigher.of(source, batch_rows, prompt_options, *outputs)
    pa.set_memory_pool(pa.system_memory_pool())
    base = peak_bytes()
    tasks, codes, num_processed = [], [], 0
    for task in SpanDatasource(source, frozen).get_read_tasks(1):
        [table] = task()
        padded = weigher.with_fillers(table)
        del table
        for start in range(0, padded.num_rows, batch_rows):  # as Ray's cut, which counts rows alone
            batch = without_fillers(padded.slice(start, batch_rows))
            decoded = image_decoding.decode_table(batch, options)
            tasks.append(batch.num_rows)
            codes += decoded["error_type"].to_pylist()
            num_processed += decoded.num_rows - decoded["packed_inputs"].null_count
            copy = pa.BufferOutputStream()  # as Ray's copy into its store
            with pa.ipc.new_stream(copy, decoded.schema) as stream:
                stream.write_table(decoded)
            del decoded, stream, copy
            gc.collect()
    peak = peak_bytes()
    clips.close_worker()
    child = peak_bytes(resource.RUSAGE_CHILDREN)
    peaks = {"base": base, "peak": peak, "child": child, "tasks": tasks, "codes": codes, "processed": num_processed}
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
