"""Writes checkpoints of tiny image models in the published formats, for tests of whole synthesis jobs.

They are the toys of `tests.toys.images`, with a VQ model of 16 × 16 px and a T5 with a vocabulary of a few words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from models.heads.medusa import MedusaHeads, MedusaShape
from models.heads.writer import save_medusa
from models.llamagen.checkpoints import save_gpt
from models.llamagen.eagle import save_image_eagle
from models.llamagen.shape import VqShape
from models.llamagen.vq import Vq
from models.llamagen.vq_files import save_vq
from tests.toys import images

FACTOR = 4
IMAGE_PX = images.GRID * FACTOR
WORDS = ("a", "red", "blue", "green", "cat", "dog", "tree", "house", "by", "old", "small", "tall")
MAX_WORDS = images.NUM_COLUMNS - 1
"""Of a prompt: the end takes a token too."""


@dataclass(frozen=True)
class ImageFolders:
    """The paths of the files."""

    root: Path

    @property
    def text(self) -> Path:
        """A text-conditional target, as a `.pt` file of the published kind with its sizes beside it."""
        return self.root / "text/t2i.pt"

    @property
    def label(self) -> Path:
        """A class-conditional target."""
        return self.root / "class"

    @property
    def drafters(self) -> dict[str, Path]:
        """By kind; the models' are for either target, the heads for the text-conditional one."""
        return {name: self.root / name for name in ("text_drafter", "class_drafter", "eagle", "medusa")}

    @property
    def vq(self) -> Path:
        return self.root / "vq"

    @property
    def t5(self) -> Path:
        return self.root / "t5"


def write_checkpoints(root: Path) -> ImageFolders:
    """Write them all, the same every time."""
    folders = ImageFolders(root)
    target = images.target("text")
    save_gpt(target.gpt, root / "text")
    (root / "text/model.safetensors").unlink()
    torch.save({"model": images.weights("text")}, folders.text)
    save_gpt(images.target("class").gpt, folders.label)
    for kind in images.KINDS:
        save_gpt(images.target(kind, noise=0.02).gpt, root / f"{kind}_drafter")
    save_image_eagle(images.eagle_network(target), target.gpt.shape, root / "eagle")
    torch.manual_seed(5)
    save_medusa(MedusaHeads(MedusaShape(3, 1, target.hidden_size, images.CODES)), root / "medusa")
    save_vq(vq_model(), folders.vq)
    write_t5(folders.t5)
    return folders


def vq_model(codebook_size: int = images.CODES) -> Vq:
    """A VQ model whose pictures are far from grey."""
    torch.manual_seed(11)
    vq = Vq(VqShape(codebook_size, code_dim=4, channels=8, multipliers=(1, 1, 2), num_res_blocks=1, latent_dim=8))
    for parameter in vq.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return vq.requires_grad_(False).eval()


def write_t5(folder: Path, width: int = images.CONDITION_DIM) -> None:
    """A T5 encoder and the tokenizer of `WORDS`."""
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: 3 + index for index, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {"d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3, "dropout_rate": 0.0}
    config = T5Config(vocab_size=len(words), d_model=width, pad_token_id=0, eos_token_id=1, **sizes)
    T5EncoderModel(config).save_pretrained(folder)
