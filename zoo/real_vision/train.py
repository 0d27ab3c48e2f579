"""Trains the vision pair: `python -m zoo.real_vision.train STAGE`, stages `tower`, `projector` and `language`."""

from __future__ import annotations

import torch
from functools import partial
from pathlib import Path
from zoo.tower import pretrain_tower, draw_labelled
from zoo.real_vision.labels import HEADS, IMAGE_PX, label_patches
from zoo.real_vision.model import VISION, build_tower
from zoo.world.dense import draw_dense
from safetensors.torch import save_file
import sys
def tower(steps, batch=16):
    out=Path("out/real_vision"); out.mkdir(parents=True,exist_ok=True)
    m=build_tower(0)
    pretrain_tower(m,VISION["hidden_size"],steps,0,HEADS,lambda step: draw_labelled(draw_dense,1,step,label_patches,batch,IMAGE_PX),batch,torch.bfloat16)
    save_file({k:v.contiguous() for k,v in m.state_dict().items()},out/"tower.safetensors")
tower(int(sys.argv[1]))
