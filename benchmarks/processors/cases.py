"""Defines the images and processors of the benchmark."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil

from benchmarks.decode import photograph
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointRef, read_config, read_processor

ZOO = Path(__file__).resolve().parents[2] / "zoo/checkpoints"
CASES = {"336 px": (640, 480, 6000), "1 MP": (1024, 1024, 1200)}
"""Width and height of the JPEG files, and number of rows of a run."""
NUM_FILES = 16


def front_end_of(case: str) -> FrontEnd:
    """Return the processor of LLaVA-1.5 (336 px) or of Qwen2.5-VL (1 MP), with the tokenizer of a zoo model."""
    ref = CheckpointRef(str(ZOO / ("caption_target" if case == "336 px" else "video_target")))
    processor = read_processor(ref, read_config(ref))
    if case == "336 px":
        size = {"height": 336, "width": 336}
        processor.image_processor = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=size)
        processor.patch_size = 14
    else:
        processor.image_processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056})
    return FrontEnd(processor)


def write_files(folder: Path, case: str, num_rows: int) -> None:
    """Write `num_rows` JPEG files of a case, of which `NUM_FILES` are different."""
    width, height, _ = CASES[case]
    files = []
    for seed in range(min(NUM_FILES, num_rows)):
        buffer = io.BytesIO()
        Image.fromarray(photograph(seed, width, height)).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    for row in range(num_rows):
        (folder / f"{row:05}.jpg").write_bytes(files[row % NUM_FILES])
