"""Lists mistakes in the keys and values of a job file, and the refusals that answer them."""

from __future__ import annotations

from docgen.mistakes.mistake import SMALL_MACHINE, Mistake

KEYS = (
    Mistake(
        "a misspelt key",
        "sampling.max_new_token: is not a known key; did you mean sampling.max_new_tokens?",
        ("sampling.max_new_token=3",),
    ),
    Mistake("a misspelt section", "samplng: is not a known key; did you mean sampling?", ("samplng.top_k=3",)),
    Mistake(
        "a key in another section",
        "pool.temperature: is not a known key; did you mean sampling.temperature",
        ("pool.temperature=0.5",),
    ),
    Mistake(
        "a word of vLLM",
        "pool.tensor_parallel: is not a known key; use pool.num_gpus: layers of a target",
        ("pool.tensor_parallel=2",),
    ),
    Mistake(
        "a word of vLLM at the top",
        "max_model_len: is not a known key; use pool.max_context_tokens",
        ("max_model_len=4096",),
    ),
    Mistake("a word of Ray Data", "pool.concurrency: is not a known key; use pool.max_size", ("pool.concurrency=4",)),
    Mistake(
        "a word of NeMo Curator", "source.input_path: is not a known key; use source.path", ("source.input_path=x",)
    ),
    Mistake(
        "a word of transformers",
        "sampling.num_beams: is not a known key; beam search is not supported",
        ("sampling.num_beams=4",),
    ),
    Mistake(
        "a key twice",
        "it is not valid YAML: a section has a key twice (line 2",
        files={"job.yaml": "job: {}\njob: {}\n"},
        has_place=False,
    ),
    Mistake("a file that is not YAML", "it is not valid YAML: ", files={"job.yaml": "source: [\n"}, has_place=False),
    Mistake(
        "a list in place of sections",
        "must be a mapping of sections, not list",
        files={"job.yaml": "- source\n"},
        has_place=False,
    ),
    Mistake(
        "no model",
        "model: is required",
        files={"job.yaml": "source: {kind: text, path: in}\nprompt: x\nsink: {path: o}\n"},
        has_place=False,
    ),
)
VALUES = (
    Mistake(
        "text for a number", "pool.slots: Input should be a valid integer, or auto, not 'many'", ("pool.slots=many",)
    ),
    Mistake(
        "a number out of range",
        "sampling.top_p: Input should be less than or equal to 1, not 1.5",
        ("sampling.top_p=1.5",),
    ),
    Mistake(
        "a number without its point",
        "sampling.temperature: Input should be a valid number; YAML parses 1e-3 as text",
        ("sampling.temperature=1e-3",),
    ),
    Mistake(
        "an unknown choice",
        "sink.compression: Input should be 'zstd', 'snappy' or 'none', not 'gzip'",
        ("sink.compression=gzip",),
    ),
    Mistake("an unknown kind", "method.tree: Input tag 'bush' found using", ("method.tree.kind=bush",)),
    Mistake("an unknown method", "method: no method is named 'sd_chian'; did you mean", ("method='sd_chian'",)),
    Mistake("an override without a value", "override 'pool.slots' must look like section.field=value", ("pool.slots",)),
    Mistake(
        "a value in place of a section", "override prompt.text: prompt is not a section but text", ("prompt.text=x",)
    ),
    Mistake(
        "credentials in a URL",
        "source.path: a URL must not hold credentials",
        ("source.path=s3://key:secret@bucket/in",),
    ),
    Mistake("a pool that shrinks", "pool: max_size (1) is smaller than min_size (3)", ("pool.min_size=3",)),
    Mistake(
        "a drafter without a checkpoint",
        "method.drafter.kind is 'model', so model.drafter must name a checkpoint",
        ("model.drafter=null",),
    ),
    Mistake(
        "a prompt and conversations", "give either prompt or columns.messages, and not both", ("columns.messages=text",)
    ),
    Mistake(
        "a rule that needs deeper drafts",
        "method: acceptance.window 5 needs blocks of at least 7 drafts before anything can be relaxed",
        ("method={drafter: {kind: model}, acceptance: {kind: fly}}",),
    ),
)
LENGTHS = (
    Mistake(
        "no context for a prompt",
        "sampling.max_new_tokens: 256 tokens of output fill pool.max_context_tokens (128), "
        "so no prompt fits; lower it, or raise",
        ("sampling.max_new_tokens=256",),
    ),
    Mistake(
        "fp8 on a CPU",
        "model.target.quantization: fp8 takes a GPU, and pool.num_gpus is 0",
        ("model.target.quantization=fp8",),
    ),
    Mistake(
        "fp8 on the device cpu",
        "model.target: quantization fp8 takes a GPU, and device is 'cpu'",
        ("model.target.quantization=fp8", "model.target.device=cpu"),
    ),
    Mistake(
        "int8 of float32 on a CPU",
        "model.target.quantization: int8 on a CPU takes the dtype bfloat16",
        ("model.target.quantization=int8", "model.target.dtype=float32"),
    ),
    Mistake(
        "KV caches beyond the memory",
        "pool.slots: 4,096 slots of 100,000,000 tokens (pool.max_context_tokens) take ",
        ("pool.slots=4096", "pool.max_context_tokens=100000000"),
    ),
    Mistake(
        "one context beyond the memory",
        "pool.max_context_tokens: 1 slot of 100,000,000 tokens (pool.max_context_tokens) take ",
        ("pool.slots=auto", "pool.max_context_tokens=100000000"),
        environment=SMALL_MACHINE,
    ),
    Mistake(
        "weights beyond the memory",
        "model.target.path: the weights need ",
        environment=SMALL_MACHINE,
        overrides=("pool.min_size=64", "pool.max_size=64"),
    ),
)
