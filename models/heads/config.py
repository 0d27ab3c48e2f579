"""Read the fields of a head's `config.json`: sizes, flags, and the configuration of its decoder layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from models.loading.checkpoints import CheckpointError

MAX_LAYERS = 16
"""Maximum number of decoder layers and feature layers of a head."""
MODEL_TYPE = "speculators_model_type"
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "hidden_act", "max_position_embeddings"),
)
"""Configuration fields of a decoder layer, besides its biases and its rotary embedding."""
BIASES = ("attention_bias", "mlp_bias")
_SIZES = ("vocab_size", *LAYER_FIELDS[:3])
_READ = ("vocab_size", *LAYER_FIELDS, *BIASES, "rope_parameters", "rope_theta", "rope_scaling")
_LAYERS: dict[str, type[Any]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


class HeadConfig(dict[str, Any]):
    """A `config.json` or an object inside it; `path` is the checkpoint that errors name. All reads raise
    CheckpointError for values that are not valid."""

    def __init__(self, data: Mapping[str, Any], path: str) -> None:
        super().__init__(data)
        self.path = path

    def error(self, problem: str) -> CheckpointError:
        """Return the error to raise for a problem of this configuration."""
        return CheckpointError(f"{self.path}: config.json: {problem}")

    def part(self, name: str) -> HeadConfig:
        """Return an inner object; empty if it is missing or of another type."""
        value = self.get(name)
        return HeadConfig(value if isinstance(value, dict) else {}, self.path)

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number; `default` if it is missing or null, and None refuses that."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.error(f"it must give {name} as a positive whole number")
        return value

    def flags(self, *names: str) -> dict[str, bool]:
        """Return those of the boolean fields `names` that are neither missing nor null."""
        flags = {name: self[name] for name in names if self.get(name) is not None}
        if wrong := [name for name, value in flags.items() if not isinstance(value, bool)]:
            raise self.error(f"{wrong[0]} must be true or false")
        return flags

    def layers(self, model_type: str, num_layers: int, **changes: Any) -> Any:
        """Return the transformers configuration of decoder layers; `changes` replace fields, with None their default.

        `model_type` is llama or qwen3.
        """
        for name in _SIZES:
            self.whole(name)
        if model_type not in _LAYERS:
            raise self.error(f"layers of model_type {model_type!r} are not known; llama and qwen3 are")
        if num_layers > MAX_LAYERS:
            raise self.error(f"{num_layers} layers are above the limit of {MAX_LAYERS}")
        fields = {name: self.get(name) for name in _READ} | changes
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return _LAYERS[model_type](**given, num_hidden_layers=num_layers)
        except Exception as error:  # transformers' own strict checks
            raise self.error(f"it describes no {model_type} layer: {error}") from None

    def rope(self) -> Mapping[str, Any]:
        """Return the options of rotary positions; empty if there are none."""
        return self.part("rope_parameters") or self.part("rope_scaling")

    def one_axis(self) -> dict[str, Any]:
        """Return changes for `layers` that remove the sections of several rotary axes; empty for one axis."""
        rope = self.rope()
        if not rope.get("mrope_section"):
            return {}
        theta = rope.get("rope_theta", self.get("rope_theta") or 10000.0)
        plain = {"rope_type": "default", "rope_theta": theta}
        return {"rope_parameters": plain, "rope_theta": None, "rope_scaling": None}

    def drafted(self, vocab_size: int) -> int:
        """Return the size of the draft vocabulary, which is at most `vocab_size`."""
        size = self.whole("draft_vocab_size", vocab_size)
        if size > vocab_size:
            raise self.error(f"draft_vocab_size is {size}, above vocab_size {vocab_size}")
        return size

    def layer_list(self, name: str, given: Any) -> list[int]:
        """Return the numbers of feature layers `given`, which the field `name` lists."""
        is_list = isinstance(given, list) and 1 <= len(given) <= MAX_LAYERS
        if not is_list or not all(type(layer) is int for layer in given):
            raise self.error(f"{name} must list 1 to {MAX_LAYERS} layers of the target")
        return given  # type: ignore[no-any-return]
