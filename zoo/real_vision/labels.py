"""Labels the patches of dense scenes: attributes of their cells, and the word that a patch contributes.

A cell is four patches wide and high. The words of its patches describe it in reading order: the first line of patches
of a row of the grid names the row and counts its objects, the second names the objects, the third the ground. The
tower learns these words, and the projector starts from the language model's embeddings of them, so that a pretrained
language model reads an image's columns as a text of its own vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.training import IGNORED
from zoo.world.dense import GRID, ROWS, in_row
from zoo.world.grammar import NUMBERS
from zoo.world.scene import COLOURS, SHAPES, SIZES, TEXTURES, TONES, Scene

IMAGE_PX, PATCH_PX = 256, 16
SIDE = IMAGE_PX // PATCH_PX
NUM_VISUAL_TOKENS = SIDE * SIDE
CELL = SIDE // GRID
"""Patches per side of a cell."""
SEPARATOR = ","
WORDS = (
    *(*ROWS, "row", "has", *NUMBERS[: GRID + 1]),
    *(*SIZES, *COLOURS, *SHAPES, *TONES, *TEXTURES, "background", SEPARATOR),
)
HEADS = {
    "filled": 2, "size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES),
    "tone": len(TONES), "texture": len(TEXTURES), "count": GRID + 1, "word": len(WORDS),
}  # fmt: skip
"""Labels of a patch and their sizes; `count` is the number of objects in its row of the grid."""


def words_of(scene: Scene) -> list[list[str]]:
    """Return the words of a scene's patches, 16 lines of 16."""
    lines = []
    for row in range(GRID):
        things = {thing.cell % GRID: thing for thing in in_row(scene, row)}
        header = [ROWS[row], "row", "has", NUMBERS[len(things)]]
        objects, ground = [], [scene.tone, scene.texture, "background", SEPARATOR] * GRID
        for column in range(GRID):
            thing = things.get(column)
            objects += [thing.size, thing.colour, thing.shape, SEPARATOR] if thing else [SEPARATOR] * CELL
        lines += [header + [SEPARATOR] * (SIDE - CELL), objects, ground, [SEPARATOR] * SIDE]
    return lines


def label_patches(scene: Scene) -> Tensor:
    """Return the labels of a scene's patches, int64 [8 heads, 256 patches]; attributes of empty cells are ignored."""
    labels = torch.full((len(HEADS), SIDE, SIDE), IGNORED)
    labels[0] = 0
    labels[4], labels[5] = TONES.index(scene.tone), TEXTURES.index(scene.texture)
    for row in range(GRID):
        labels[6, row * CELL : (row + 1) * CELL] = len(in_row(scene, row))
    labels[7] = torch.tensor([[WORDS.index(word) for word in line] for line in words_of(scene)])
    for thing in scene.things:
        row, column = thing.cell // GRID * CELL, thing.cell % GRID * CELL
        values = (1, SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape))
        labels[:4, row : row + CELL, column : column + CELL] = torch.tensor(values)[:, None, None]
    return labels.flatten(1)
