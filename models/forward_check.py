"""Compare the engine's logits with those of the model's own `forward` at load time, on text and on a small image.

The engine runs a ragged prefill of two prompts and then a step of several tokens; the model runs its own `forward`
over the same tokens. A text prompt is longer than the windows and other thresholds in the configuration, if the work
allows it, and the masks that the attention of the model receives are compared with a causal mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.backends.mask_rules import LayerRule, rules_of, set_rules
from models.inputs.prefix import Prefix, capture
from models.inputs.processing import FrontEnd, PromptError
from models.kv.lanes import LaneModel, SlotBatch
from models.loading.checkpoints import CheckpointError, first_line
from models.loading.layers.attention_calls import recorded
from models.loading.layers.layer_rules import UnsupportedMask, with_blocks
from models.prompt_blocks import UnknownMaskError, visible_of

MAX_TOKENS = 4096
"""Longest test prompt in tokens; bounds the masks of a forward."""
MAX_WORK = 1 << 37
"""Maximum multiplications of weights in one forward of a test prompt: tokens times parameters. A forward of 2,000
tokens of a model of 70 million parameters, or of 137 tokens of one of a billion."""
WIDTHS = re.compile(
    r"_ids?$|_index$|pinpoints|label|vocab|hidden|intermediate|ffn|inner|embd|embed|model$|dim|rank|theta|max_|positions$|seq_length$"
    r"|heads?$|layers?$|experts?(_per_tok)?$",
    re.IGNORECASE,
)
"""Names of integers that are sizes and numbers of weights, token ids or the longest context."""
ORIGINAL = "original_max_position_embeddings"
OTHER_PARTS = re.compile(r"vision|audio|speech|talker|quantization|image", re.IGNORECASE)
"""Names of nested configurations that are not of the language model."""
LONGEST = re.compile(r"^(max_(\w+_)?positions?(_embeddings)?|n_positions|max_seq_len|n_ctx|seq_length)$")
"""Names of the number of positions of a model; tables of learned positions have no others."""
TOKEN_TYPES = "token_type_ids"
"""Output of processors that marks tokens of images, or of a prefix whose tokens read each other."""
NUM_NODES = 4
"""Number of tokens of the step that follows the prompts."""
TEXT_LENGTHS = (16, 4)
"""Minimum lengths in tokens of the two text prompts, which share one ragged prefill."""
PASSAGE = (
    "The old mill stands by the river, and its wheel turns slowly while the miller counts his sacks of grain before "
    "the carts leave for the town."
)
"""Text of the prompts. Models amplify the rounding of half precision less on language than on arbitrary tokens."""
PICTURE_SIDES_PX = (64, 96)
"""Height and width of the test image in pixels; processors resize it."""
BOUNDS = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest accepted relative difference of logits, by dtype; see `_difference`.

After tens of layers, rounding alone causes about 1e-6 in fp32, 2e-3 in fp16 and 2e-2 to 5e-2 in bf16. Positions
that are one too high or too low cause 0.26 and more in SmolLM2-135M.
"""


def prove(
    model: nn.Module,
    decoder: nn.Module,
    head: nn.Module,
    front_end: FrontEnd,
    visual_ids: frozenset[int],
    name: str,
    max_context_tokens: int | None = None,
) -> None:
    """Compare the engine's logits with the model's own, for text prompts and for an image if the model takes images.

    No context is longer than `max_context_tokens`. Raises: CheckpointError if they differ by more than `BOUNDS`, or if
    the model cannot run over the engine's KV cache.
    """
    device, dtype = next(decoder.parameters()).device, next(decoder.parameters()).dtype
    before = decoder.config._attn_implementation  # type: ignore[union-attr]
    owner: Any = getattr(model, "model", model)
    deltas = getattr(owner, "rope_deltas", None)
    vocab_size = int(head.weight.shape[0])  # type: ignore[index]
    reserved = visual_ids | set(getattr(front_end.tokenizer, "all_special_ids", None) or [])
    plain = [token for token in range(vocab_size) if token not in reserved][: 1 << 16]
    if not plain:
        raise _refusal(name, "its vocabulary holds special tokens alone")
    longest = prompt_length(model, decoder, TEXT_LENGTHS[0], NUM_NODES, max_context_tokens)
    read = _passage(front_end, plain, TEXT_LENGTHS[0] + NUM_NODES, longest - TEXT_LENGTHS[0])
    tokens, nodes = (torch.tensor([part], device=device) for part in (read[:-NUM_NODES], read[-NUM_NODES:]))
    prompts = {"text": [{"input_ids": tokens[:, -length:]} for length in (longest, TEXT_LENGTHS[1])]}
    if front_end.takes_images:
        placed = {
            key: value.to(device, dtype if value.is_floating_point() else None)
            for key, value in _picture_prompt(front_end, name).items()
        }
        if TOKEN_TYPES in placed:
            # Processors return types for text as well; 0 is text, and the prefix of PaliGemma.
            for prompt in prompts["text"]:
                prompt[TOKEN_TYPES] = torch.zeros_like(prompt["input_ids"])
        prompts["a picture"] = [placed, prompts["text"][1]]
    try:
        with torch.inference_mode():
            for kind, inputs in prompts.items():
                decoder.set_attn_implementation(before)  # type: ignore[operator]
                bound = BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
                try:
                    problem = _problem(model, decoder, head, inputs, nodes, visual_ids, bound)
                except (UnsupportedMask, UnknownMaskError) as error:
                    problem = str(error)
                if problem:
                    raise _refusal(name, f"with {kind}, {problem}")
    except (CheckpointError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # unknown architectures may raise any error on positions, masks or images
        raise _refusal(name, f"it does not run over a KV cache of the engine ({first_line(error)})") from error
    finally:
        decoder.set_attn_implementation(before)  # type: ignore[operator]
        if hasattr(owner, "rope_deltas"):
            owner.rope_deltas = deltas


def _problem(
    model: nn.Module,
    decoder: nn.Module,
    head: nn.Module,
    prompts: list[dict[str, Tensor]],
    nodes: Tensor,
    visual_ids: frozenset[int],
    bound: float,
) -> str | None:
    """Return why the engine cannot run the model with these prompts, followed by `nodes` (1, N); None if it can."""
    rules = list(rules_of(decoder)) or [LayerRule()] * decoder.config.num_hidden_layers  # type: ignore[operator,union-attr]
    extended = []
    new_types = 0
    for inputs in prompts:
        logits, rules, groups = _recorded_logits(model, decoder, _extend(inputs, nodes), rules)
        if groups is not None and groups[-1] < len(groups) - 1 and TOKEN_TYPES in inputs:
            # Generated tokens are causal. In PaliGemma, tokens of type 0 are a prefix that they would lengthen.
            new_types = 1
            logits, rules, groups = _recorded_logits(model, decoder, _extend(inputs, nodes, new_types), rules)
        extended.append(logits)
    set_rules(decoder, rules)
    changed = [_reference_logits(model, _extend(inputs, nodes.flip(1), new_types)) for inputs in prompts]
    alone = [_reference_logits(model, inputs) for inputs in prompts]
    for long, other, short in zip(extended, changed, alone, strict=True):
        if not long.isfinite().all():
            return "its own logits are not finite"
        known = long[: len(short)]
        if _difference(short, known) > bound or _difference(other[: len(short)], known) > bound:
            return "logits of earlier tokens change with later ones"
    prefixes = [capture(model, decoder, inputs, visual_ids) for inputs in prompts]
    prefilled, stepped = _engine_logits(decoder, head, prefixes, nodes)
    for long, first, then in zip(extended, prefilled, stepped, strict=True):
        if _difference(first, long[: len(first)]) > bound:
            return "attention by the rules of its layers gives other logits of a prompt than its own forward"
        if _difference(then, long[len(first) :]) > bound:
            return (
                "tokens behind a prompt get other logits than in its own forward: it ignores the positions that it is "
                "given, or counts them its own way"
            )
    return None


def _engine_logits(
    decoder: nn.Module, head: nn.Module, prefixes: list[Prefix], nodes: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the engine's logits: for each prompt, (L, V) of its tokens and (N, V) of the nodes that follow it."""
    capacity = max(prefix.length for prefix in prefixes) + NUM_NODES
    lanes = LaneModel(decoder, head, len(prefixes), 1, capacity)
    index = torch.arange(len(prefixes), device=nodes.device)
    slots = SlotBatch(index, tuple(range(len(prefixes))), (1,) * len(prefixes))
    prefill = lanes.admit(slots, [[prefix] for prefix in prefixes])
    first = [lanes.logits(states) for states in prefill.states]
    depth = torch.arange(NUM_NODES, device=nodes.device).expand(len(prefixes), -1)
    visible = depth[:, :, None] >= depth[:, None]
    every = nodes.expand(len(prefixes), -1)
    if lanes.cache.states is None:
        return first, list(lanes.logits(lanes.forward(slots, every, depth, visible)[:, 0]))
    # The states of recurrent layers follow accepted tokens: half of the nodes, of which the others are rejected.
    half = NUM_NODES // 2
    drafted = lanes.forward(slots, torch.cat([every[:, :half], every.flip(1)[:, half:]], dim=1), depth, visible)
    lanes.commit(slots, depth[:, :0], torch.full_like(index, half))
    slots = SlotBatch(index, slots.ids, (1 + half,) * len(prefixes))
    hidden = lanes.forward(slots, every[:, half:], depth[:, :half], visible[:, :half, :half])
    return first, list(lanes.logits(torch.cat([drafted[:, 0, :half], hidden[:, 0]], dim=1)))


def _reference_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits (L, V) of the model's own forward, in fp32."""
    owner: Any = getattr(model, "model", model)
    if hasattr(owner, "rope_deltas"):
        owner.rope_deltas = None  # left by the previous prompt
    out: Tensor = model(**inputs, use_cache=False).logits[0]
    return out.float()


def _recorded_logits(
    model: nn.Module, decoder: nn.Module, inputs: dict[str, Tensor], rules: list[LayerRule]
) -> tuple[Tensor, list[LayerRule], Tensor | None]:
    """Return the logits (L, V) of the model's own forward, in fp32, the rules of its layers with their blocks, and the
    blocks (L,) of the prompt; raises UnsupportedMask if a mask that attention receives follows no rule."""
    with recorded(decoder) as recording:
        logits = _reference_logits(model, inputs)
    masks = []
    for call in recording.calls:
        if call.mask is not None:
            if call.mask.dtype != torch.bool and bool(call.mask[visible_of(call.mask)].any()):
                raise UnsupportedMask("its attention receives a mask that changes scores")
            masks.append((call.layer, call.mask))
    return logits, *with_blocks(rules, masks)


def _extend(inputs: dict[str, Tensor], nodes: Tensor, new_types: int = 0) -> dict[str, Tensor]:
    """Append the text tokens `nodes` (1, N), of type `new_types`, to a prompt; the processor's other per-token outputs
    are extended alike."""
    length = inputs["input_ids"].shape[1]
    longer = dict(inputs)
    for key, value in inputs.items():
        if value.dim() == 2 and value.shape == (1, length) and not value.is_floating_point():
            number = new_types if key == TOKEN_TYPES else int(key == "attention_mask")
            more = nodes if key == "input_ids" else torch.full_like(nodes, number)
            longer[key] = torch.cat([value, more.to(value.dtype)], dim=1)
    return longer


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return |ours − theirs| / |theirs − mean over V| (Frobenius) of logits (L, V); inf if a logit is not finite."""
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        return float("inf")
    theirs = theirs.to(ours.device)
    spread = float((theirs - theirs.mean(-1, keepdim=True)).norm())
    return float((ours - theirs).norm()) / max(spread, 1e-30)


def _passage(front_end: FrontEnd, plain: list[int], length: int, num_before: int = 0) -> list[int]:
    """Return the first `length` tokens of the passage behind `num_before` tokens of repeated passages, or different
    tokens if the vocabulary does not cover it."""
    known = set(plain)
    passage = front_end.tokenizer(PASSAGE, add_special_tokens=False)["input_ids"]
    tokens = passage[:length]
    if len(set(tokens) & known) * 2 > length:
        repeated = passage * (num_before // len(passage) + 1)
        return [token if token in known else plain[0] for token in repeated[len(repeated) - num_before :] + tokens]
    return [plain[(7919 + 104_729 * step) % len(plain)] for step in range(num_before + length)]


def _picture_prompt(front_end: FrontEnd, name: str) -> dict[str, Tensor]:
    """Return the processor's outputs for a random image and a question; uses the chat template if there is one."""
    height, width = PICTURE_SIDES_PX
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    token = getattr(front_end.processor, "image_token", "")
    attempts: tuple[Callable[[], str], ...] = (
        lambda: front_end.render([{"role": "user", "content": content}]),
        lambda: f"{token}What is this?",
        lambda: "What is this?",
    )
    failure: Exception | None = None
    for text in attempts:
        try:
            return front_end.encode(text(), [picture])
        except PromptError as error:
            failure = error
    raise _refusal(name, f"its processor refuses a picture of {height} x {width} pixels ({failure})")


def _refusal(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{name}: cannot be run: {' '.join(reason.split())}")


def prompt_length(
    model: nn.Module, decoder: nn.Module, least: int, reserved: int, max_context_tokens: int | None
) -> int:
    """Return the length in tokens of a prompt that is followed by `reserved` tokens.

    It is `least`, or twice the largest integer of the configuration that may be a window or another threshold of a
    context, as far as `MAX_TOKENS`, `MAX_WORK`, the positions of the model and `max_context_tokens` allow.
    """
    config: Any = decoder.config
    positions = [value for name, value in config.to_dict().items() if LONGEST.search(name)]
    known = [number for number in (*positions, max_context_tokens) if isinstance(number, int) and number > 0]
    possible = min(MAX_TOKENS, *known) - reserved
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    bound = min(possible, MAX_WORK // max(num_parameters, 1) - reserved)
    passed = [number for number in thresholds(model.config.to_dict()) if number < bound]  # type: ignore[operator,union-attr]
    return max(min(least, possible), min(2 * max(passed, default=0), bound))


def thresholds(settings: dict[str, Any]) -> set[int]:
    """Return the positive integers of a configuration, nested ones included, that may be thresholds in tokens."""
    integers: set[int] = set()
    pending: list[tuple[str, Any]] = list(settings.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [] if OTHER_PARTS.search(name) else [(str(key), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(name, item) for item in value]
        elif type(value) is int and value > 0 and (name == ORIGINAL or not WIDTHS.search(name)):
            integers.add(value)
    return integers
