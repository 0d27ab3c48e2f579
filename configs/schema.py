"""Defines the schema of a caption job, and the sections that all jobs share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, StringConstraints, model_validator

from configs.acceptance import AuditConfig, ExactAcceptanceConfig, LanternAcceptanceConfig
from configs.method import MethodConfig
from configs.output import ChecksConfig, ExportConfig, OutputConfig, RetryConfig
from configs.pool import JobSectionConfig, PoolConfig
from configs.section import Device, Place, Section
from configs.source import SourceConfig


class MessageConfig(Section):
    """One turn of the conversation; `text` may contain `{column}` placeholders."""

    role: Literal["system", "user", "assistant"]
    """`system`, `user` or `assistant`; the last turn is the user's."""
    text: str
    """The turn's text; `{column}` is replaced by the row's value, `{{` by a brace."""
    images: bool | None = None
    """Whether this turn carries the row's images; by default the first user turn does."""


OptionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w{0,63}$")]
OptionValue = bool | int | FiniteFloat | Annotated[str, StringConstraints(max_length=4096)] | None


class PromptConfig(Section):
    """The prompt: either the text of a single user turn, or messages."""

    text: str | None = None
    """One user turn; `prompt: some text` is its short form."""
    # Not strict, because the short form is validated as Python data, in which lists are not accepted for tuples.
    messages: Annotated[tuple[MessageConfig, ...], Field(strict=False)] = ()
    """The turns of a conversation."""
    template_options: Annotated[dict[OptionName, OptionValue], Field(max_length=32)] = Field(default_factory=dict)
    """Values that the target's chat template reads besides the messages, such as `enable_thinking: false`. With
    `columns.messages`, the section has these alone."""
    answer_prefix: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None
    """Text that the [answer begins with](../guides/caption.md#answer-prefixes), taken literally; the target continues
    it."""
    keep_answer_prefix: bool = True
    """Whether `generated_text` begins with `answer_prefix`."""

    @property
    def has_turns(self) -> bool:
        """Whether the section has a prompt, and not only options of the chat template."""
        return self.text is not None or bool(self.messages)

    def content(self) -> dict[str, Any]:
        """Return the fields that determine the output; outputs that are older than a key have the same content without
        it."""
        data = self.model_dump(mode="json")
        if not self.template_options:
            del data["template_options"]
        if self.answer_prefix is None:
            del data["answer_prefix"], data["keep_answer_prefix"]
        return data

    @model_validator(mode="after")
    def _one_of(self) -> PromptConfig:
        if not self.has_turns and self.template_options:
            return self
        if (self.text is None) == (not self.messages):
            raise ValueError("give either prompt.text or prompt.messages, and not both")
        if self.messages and self.messages[-1].role != "user":
            raise ValueError("prompt.messages must end with a user turn, which the model then answers")
        return self


class RowColumnsConfig(Section):
    """Columns with prompts and sampling options per row; a row without a value uses the job's value."""

    prompts: str | None = None
    """Several prompts per sample: a list, or its JSON. Each prompt is `{prompt}` in the template and yields an output
    row with the id `<id>#0`, `<id>#1`, …."""
    messages: str | None = None
    """A conversation, or its JSON, that ends with a user turn; replaces `prompt`."""
    seed: str | None = None
    """The row's seed."""
    temperature: str | None = None
    """In place of `sampling.temperature`."""
    top_k: str | None = None
    """In place of `sampling.top_k`."""
    top_p: str | None = None
    """In place of `sampling.top_p`."""
    repetition_penalty: str | None = None
    """In place of `sampling.repetition_penalty`."""
    max_new_tokens: str | None = None
    """In place of `sampling.max_new_tokens`."""


SHORT_PROMPT = BeforeValidator(lambda value: {"text": value} if isinstance(value, str) else value)
"""Validator that accepts a string in place of a section with the key `text`."""


class WeightsConfig(Section):
    """The checkpoint of one network, and the dtype and device of its weights."""

    path: Place
    """A folder written by `save_pretrained`, a hub id, or a folder in an [object store](../guides/storage.md#weights).
    """
    revision: str | None = None
    """A commit, tag or branch of the hub; for a local folder or an object store, the hash that a dry run prints."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` (as stored), `float32`, `bfloat16`, `float16`."""
    device: Device = "auto"
    """`auto` is the first CUDA device if there is one, else the CPU."""


class CheckpointConfig(WeightsConfig):
    """The checkpoint of one model, and whether its own code may run; see `path` for the accepted locations."""

    allow_remote_code: bool = False
    """Whether code that comes with the checkpoint may run."""


class AdaptedCheckpointConfig(CheckpointConfig):
    """The checkpoint of a model, and an adapter that is merged into its weights."""

    adapter: Place | None = None
    """A folder of a [LoRA adapter](../guides/caption.md#adapters) of PEFT, which every node has; it is merged when the
    model is loaded."""


class TargetCheckpointConfig(AdaptedCheckpointConfig):
    """The target model, whose distribution a lossless method preserves."""

    quantization: Literal["none", "int8", "fp8"] = "none"
    """`int8`, or on a GPU `fp8`: the decoder's weights are [rounded](../guides/sizing.md#memory) when loaded; the
    rounded model is then the target."""

    @model_validator(mode="after")
    def _multiplied(self) -> TargetCheckpointConfig:
        if self.quantization == "int8" and self.device == "cpu" and self.dtype in ("float32", "float16"):
            raise ValueError(f"quantization int8 on a CPU takes the dtype bfloat16, and dtype is '{self.dtype}'")
        if self.quantization == "fp8" and self.device == "cpu":
            raise ValueError("quantization fp8 takes a GPU, and device is 'cpu'; on a CPU there is int8")
        return self


class ModelConfig(Section):
    """The target model and the checkpoint of its drafter."""

    target: TargetCheckpointConfig
    drafter: AdaptedCheckpointConfig | None = None
    """A smaller model, an EAGLE head, Medusa heads or a block drafter for the target; not needed by the drafters
    `none`, `lookup`, `jacobi`, `suffix` and `layer_skip`."""


Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[tuple[Token, ...], Field(min_length=1, max_length=64)]


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, int) else value


def _repeats(value: int) -> int:
    if value < 0 or value == 1:
        raise ValueError("give 0 (off) or at least 2: a sequence that occurs once is no loop")
    return value


class SamplingConfig(Section):
    """Sampling parameters of generated text; see `decoding.Sampling`. The logits processors, from `repetition_penalty`
    to `forced_eos_token_id`, have transformers' names and meaning. A processor that the job does not set is that of the
    target's [generation settings](../guides/caption.md#generation-settings)."""

    num_captions_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of [captions per prompt](../guides/caption.md#several-captions), each with noise of its own."""
    max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Maximum number of generated tokens of a row."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Softmax temperature; 0 is greedy decoding."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Sample from this number of most likely tokens; 0 is off."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the most likely tokens with this total probability; 1 is off."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sample from tokens with at least this share of the largest probability; 0 is off."""
    from_checkpoint: bool = False
    """Whether temperature, `top_k`, `top_p` and `min_p` that the job does not set are those of the target's generation
    settings, as `generate` uses them."""
    ignored_settings: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    """Names of generation settings of the target that are not followed, such as `[num_beams]`; settings that are not
    supported are otherwise refused."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """Penalty on tokens of the prompt and the output; 1 is off."""
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=64)] = 0
    """No sequence of this number of tokens occurs twice in prompt and output; 0 is off."""
    bad_words_ids: Annotated[tuple[Tokens, ...], Field(max_length=4096)] = ()
    """Token sequences that are not generated."""
    sequence_bias: Annotated[tuple[tuple[Tokens, FiniteFloat], ...], Field(max_length=4096)] = ()
    """Pairs `[[tokens], bias]`: the bias is added to the last token's logit after the other tokens."""
    suppress_tokens: Annotated[tuple[Token, ...], Field(max_length=2**20)] = ()
    """Tokens that are not generated."""
    begin_suppress_tokens: Annotated[tuple[Token, ...], Field(max_length=4096)] = ()
    """Tokens that are not generated first."""
    min_new_tokens: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Minimum number of generated tokens before EOS."""
    min_length: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Minimum number of tokens of prompt and output before EOS; without effect if `min_new_tokens` is set."""
    forced_bos_token_id: Token | None = None
    """First generated token if the prompt has one token."""
    # Not strict, because one token is validated as Python data, in which lists are not accepted for tuples.
    forced_eos_token_id: Annotated[tuple[Token, ...], BeforeValidator(_listed), Field(strict=False, max_length=64)] = ()
    """The token, or one of these tokens, that is generated last when `max_new_tokens` is reached."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end the text; they are removed from it."""
    ignore_eos: bool = False
    """Continue after an EOS token."""
    stop_loops: Annotated[int, AfterValidator(_repeats), Field(le=65_536)] = 0
    """Number of repetitions of a sequence of 1 to 64 tokens that [end a text](../guides/caption.md#loops) as `looped`;
    0 is off."""
    min_loop_tokens: Annotated[int, Field(ge=2, le=65_536)] = 64
    """Minimum number of tokens of the repetitions that end a text."""

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `decoding.Sampling`."""
        return self.model_dump(exclude={"num_captions_per_prompt", "from_checkpoint", "ignored_settings"})

    @property
    def ends(self) -> Iterator[str]:
        """Names of the options that decide where a text begins and ends, and are set."""
        lengths = ("min_new_tokens", "min_length", "forced_bos_token_id", "forced_eos_token_id")
        for name in ("stop", "ignore_eos", *lengths):
            if getattr(self, name) != type(self).model_fields[name].default:
                yield name

    def content(self) -> dict[str, Any]:
        """Return the fields that determine the output; outputs without the newer fields have them at their defaults."""
        data = self.model_dump(mode="json")
        plain = SamplingConfig().model_dump(mode="json")
        return {
            name: value
            for name, value in data.items()
            if name in FIRST_SAMPLING or (value != plain[name] and name not in ("from_checkpoint", "ignored_settings"))
        }


FIRST_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "ignore_eos")
"""Keys of `sampling` that all outputs have, also those that were begun before further keys existed."""


class SinkConfig(Section):
    """The output: `data/`, `errors/` and `_job/` under `path`."""

    path: Place
    """The output directory; a job resumes an existing output."""
    keep_columns: tuple[str, ...] = ()
    """Input columns that are copied into every output row."""
    rows_per_file: Annotated[int, Field(ge=1)] = 10_000
    """Maximum number of rows of one Parquet file."""
    max_unsaved_seconds: Annotated[float, Field(ge=0.0, le=86_400.0)] = 300.0
    """Longest time until a finished row is durable; 0 writes rows at once."""
    compression: Literal["zstd", "snappy", "none"] = "zstd"
    """Compression of Parquet files: `zstd`, `snappy` or `none`."""


class CaptionSinkConfig(SinkConfig):
    """The output: `data/`, `errors/` and `_job/` under `path`."""

    keep_tokens: bool = False
    """Whether generated tokens are written, as `token_ids`; drafters are
    [trained](../guides/train-drafter.md#answers-of-a-job) on them."""
    # Not strict, as for `PromptConfig.messages`.
    exports: Annotated[tuple[ExportConfig, ...], Field(strict=False)] = ()
    """Further [forms](../guides/output.md#exports) of the results, which are written when all rows are published."""


class DatasetJobConfig(Section):
    """Base of the jobs that write a dataset; a job can resume the output of a job with equal `content`."""

    _sink_content: ClassVar[tuple[str, ...]] = ("keep_columns",)
    if TYPE_CHECKING:  # each job declares its sections, in its order
        source: SourceConfig
        method: MethodConfig
        model: Any
        job: Any

    @model_validator(mode="after")
    def _has_drafter(self) -> Self:
        if self.method.needs_checkpoint and self.model.drafter is None:
            kind = self.method.drafting.drafter.kind
            raise ValueError(f"method.drafter.kind is '{kind}', so model.drafter must name a checkpoint")
        return self

    @property
    def has_conversations(self) -> bool:
        """Whether the prompts are conversations in the rows."""
        return False

    @property
    def reads_images(self) -> bool:
        """Whether rows may have images as input."""
        return False

    @property
    def reads_videos(self) -> bool:
        """Whether rows may have videos as input."""
        return False

    def resolved(self) -> dict[str, Any]:
        """Return the whole configuration as plain JSON data, with defaults."""
        return self.model_dump(mode="json")

    def content(self, revisions: dict[str, str]) -> dict[str, Any]:
        """Return all fields that determine the output: source, prompt, models, method, sampling, seed.

        Pools, devices, limits of time and memory, and sizes of files and spans are excluded, because they may change
        between attempts.
        """
        data = self.resolved()
        del data["pool"]
        data["job"] = {"seed": self.job.seed}
        data["sink"] = {name: data["sink"][name] for name in self._sink_content}
        data["method"] = self.method.content()
        data["source"] = self.source.content(self.reads_images, self.reads_videos, self.has_conversations)
        for weights in filter(None, data["model"].values()):
            del weights["device"]
            if weights.get("adapter") is None:  # outputs that are older than the key have the same content without it
                weights.pop("adapter", None)
        return {**data, "revisions": revisions}

    def fingerprint(self, revisions: dict[str, str]) -> str:
        """Return a short hash of `content`."""
        content = json.dumps(self.content(revisions), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class CaptionJobConfig(DatasetJobConfig):
    """A caption job: images, videos or text in, generated text out."""

    source: SourceConfig
    prompt: Annotated[PromptConfig | None, SHORT_PROMPT] = None
    columns: RowColumnsConfig = RowColumnsConfig()
    model: ModelConfig
    method: MethodConfig = MethodConfig()
    sampling: SamplingConfig = SamplingConfig()
    output: OutputConfig | None = None
    checks: ChecksConfig | None = None
    retry: RetryConfig | None = None
    pool: PoolConfig = PoolConfig()
    sink: CaptionSinkConfig
    job: JobSectionConfig = JobSectionConfig()
    audit: AuditConfig | None = None

    @model_validator(mode="after")
    def _audits_losses(self) -> CaptionJobConfig:
        if self.audit is None:
            return self
        if self.method.verify_mode == "lossless":
            raise ValueError(
                f"audit: the method '{self.method.label}' is lossless, so its rows are those of plain decoding; leave "
                "audit out, and check a finished output with jobs.verify"
            )
        if self.audit.on_exceeded == "lossless":
            try:
                _ = self.lossless_method
            except ValueError as error:
                raise ValueError(
                    f"audit.on_exceeded: 'lossless' decodes with method.acceptance 'exact', which is refused: {error}"
                ) from None
        return self

    @property
    def active_audit(self) -> AuditConfig | None:
        """The audit; None without one, and while rows are decoded losslessly, also after the budget was exceeded."""
        return None if self.method.acceptance.lossless else self.audit

    @property
    def lossless_method(self) -> MethodConfig:
        """The method with acceptance `exact`, under a name of its own; ValueError if they may not be combined."""
        name = f"{self.method.name}+exact" if self.method.name else None
        data = {**dict(self.method), "acceptance": ExactAcceptanceConfig(), "name": name}
        return MethodConfig(**data)

    @model_validator(mode="after")
    def _fits_together(self) -> CaptionJobConfig:
        has_prompt = self.prompt is not None and self.prompt.has_turns
        if has_prompt == (self.columns.messages is not None):
            raise ValueError("give either prompt or columns.messages, and not both")
        if self.columns.prompts is not None and not has_prompt:
            raise ValueError("columns.prompts fill the template of prompt; a conversation is asked once")
        if isinstance(self.method.acceptance, LanternAcceptanceConfig):
            raise ValueError("method.acceptance 'lantern' accepts codes of similar images, and a text has none")
        if any(getattr(method.drafter, "fill", None) == "above" for method in self.method.methods):
            raise ValueError(
                "method.drafter.fill 'above' copies codes of the image row above, and a text has none; use repeat"
            )
        self._check_output()
        self._check_captions()
        self._check_retries()
        target, pool = self.model.target, self.pool
        if pool.gpus > 1 and target.device != "auto":
            raise ValueError(
                f"model.target.device is '{target.device}', but with pool.num_gpus {pool.gpus:g} its layers are "
                "spread over the actor's GPUs; leave it out"
            )
        if target.quantization != "none" and pool.compile == "always":
            raise ValueError(
                f"model.target.quantization is '{target.quantization}', and such weights are not compiled; take "
                "pool.compile 'auto' or 'never'"
            )
        return self

    def content(self, revisions: dict[str, str]) -> dict[str, Any]:
        """Return the fields of `DatasetJobConfig.content`, and `output`, `checks`, `retry`, `sink.keep_tokens`, share
        and metric of `audit` if they are set: without them, outputs that were begun before these keys existed have the
        same content."""
        data = super().content(revisions) | {"sampling": self.sampling.content()}
        data["prompt"] = None if self.prompt is None else self.prompt.content()
        for key in ("output", "audit", "checks", "retry"):
            del data[key]
        for key in ("checks", "retry"):
            if (section := getattr(self, key)) is not None:
                data[key] = section.model_dump(mode="json", exclude_none=True)
        if self.output is not None:
            data["output"] = self.output.content()
        if self.audit is not None:
            data["audit"] = {"share": self.audit.share, "metric": self.audit.metric}
        if self.sink.keep_tokens:
            data["sink"]["keep_tokens"] = True
        return data

    def _check_captions(self) -> None:
        """Check that several captions of a prompt differ, and are the only rows of their sample."""
        sampling, columns = self.sampling, self.columns
        if (number := sampling.num_captions_per_prompt) == 1:
            return
        where = f"sampling.num_captions_per_prompt is {number}"
        if sampling.temperature == 0 and not sampling.from_checkpoint and columns.temperature is None:
            raise ValueError(f"{where}, and at temperature 0 all are the same caption")
        if columns.prompts is not None:
            raise ValueError(f"{where}, and columns.prompts has several prompts per sample; repeat them there")
        if self.source.video.cuts:
            raise ValueError(f"{where}, and source.video.{self.source.video.cut_by} makes several clips of a sample")

    def _check_retries(self) -> None:
        """Check that further attempts have a reason, and differ from the first."""
        if self.retry is None:
            return
        if self.checks is None:
            raise ValueError("retry: rows that fail checks are tried again, and there is no section checks")
        if self.retry.temperature is not None:
            return
        sampling = self.sampling
        if sampling.temperature == 0 or sampling.from_checkpoint or self.columns.temperature is not None:
            raise ValueError("retry.temperature: give a temperature: at 0, which rows may have, attempts are equal")

    def _check_output(self) -> None:
        """Check the options that end texts, and the drafters that need a structure."""
        if self.output is None:
            for where, method in self.method.places.items():
                if method.drafts_grammar:
                    raise ValueError(f"{where}: drafts follow the section output, and there is none")
            return
        if (name := next(self.sampling.ends, None)) is not None:
            raise ValueError(f"sampling.{name}: the structure of output decides where a text ends; leave it out")
        if self.prompt is not None and self.prompt.answer_prefix is not None:
            raise ValueError("prompt.answer_prefix: the structure of output decides how a text begins; leave it out")

    @property
    def template_options(self) -> dict[str, Any]:
        """Options of the target's chat template."""
        return {} if self.prompt is None else dict(self.prompt.template_options)

    @property
    def has_conversations(self) -> bool:
        return self.columns.messages is not None

    @property
    def reads_images(self) -> bool:
        return self.source.may_have_images or self.has_conversations

    @property
    def reads_videos(self) -> bool:
        return self.source.may_have_videos or self.has_conversations

    @property
    def reports_partial(self) -> bool:
        """Whether the output has the column `partial_video`."""
        return self.reads_videos and self.source.video.report_partial

    @property
    def multiplies_rows(self) -> bool:
        """Whether one sample may become several rows: clips of its video, several prompts, or several captions."""
        return (
            self.source.video.cuts
            or self.columns.prompts is not None
            or self.sampling.num_captions_per_prompt > 1
        )
