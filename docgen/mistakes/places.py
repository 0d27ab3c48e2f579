"""Lists mistakes in the machines, outputs, sources, stores and models of a job, and the refusals that answer them."""

from __future__ import annotations

from docgen.mistakes.mistake import (
    CLOSED_PORT,
    CLUSTER,
    DENIED,
    NO_BUCKET,
    NO_CLUSTER,
    NO_CREDENTIALS,
    OTHER_REGION,
    READ_ONLY,
    SUBMITTED,
    UNKNOWN_HOST,
    Mistake,
)

GPUS = (
    Mistake(
        "a GPU on a machine without one",
        "pool.num_gpus: 1 GPU for each actor, and this machine has no GPU; leave it out (auto)",
        ("pool.num_gpus=1",),
    ),
    Mistake(
        "more GPUs than the machine has",
        "pool.num_gpus: 2 GPUs for each actor, and this machine has 1 GPU",
        ("pool.num_gpus=2",),
        gpus=1,
    ),
    Mistake(
        "more actors than GPUs",
        "pool.num_gpus: 1 GPU for each of 2 actors (pool.min_size), and this machine has 1 GPU",
        ("pool.num_gpus=1", "pool.min_size=2", "pool.max_size=2"),
        gpus=1,
    ),
    Mistake(
        "the device cuda without a GPU",
        "model.target.device: 'cuda', and pool.num_gpus (auto) is 0",
        ("model.target.device=cuda",),
    ),
    Mistake(
        "an accelerator that is not there",
        "pool.accelerator_type: H100, and no Ray on this machine has it",
        ("pool.accelerator_type=H100",),
    ),
    Mistake(
        "a label that no node has",
        "pool.label_selector: {pool: gpu}, and no Ray on this machine has these labels",
        ("pool.label_selector={pool: gpu}",),
    ),
    Mistake(
        "more CPUs than the machine has",
        "pool.decode_cpus: one decoding task takes 999 CPUs, and",
        ("pool.decode_cpus=999",),
    ),
    Mistake(
        "more GPUs than a node type of the autoscaler",
        "pool.num_gpus: 8 GPUs for each actor, and the cluster at "
        "head:6379 has no GPU; its autoscaler can add 2 of type small (4 GPUs)",
        ("pool.num_gpus=8", "job.ray_address=head:6379", "source.path={folder}/in", "sink.path={folder}/out"),
        environment=CLUSTER,
    ),
    Mistake(
        "more actors than the autoscaler can add",
        "pool.num_gpus: 4 GPUs for each of 3 actors (pool.min_size), and the cluster at head:6379",
        ("pool.num_gpus=4", "pool.min_size=3", "pool.max_size=3", "job.ray_address=head:6379"),
        environment=CLUSTER,
    ),
    Mistake(
        "no cluster",
        "job.ray_address: auto cannot be reached: Could not find any running Ray instance",
        ("job.ray_address=auto",),
        environment=NO_CLUSTER,
    ),
    Mistake(
        "GPUs for a training without one",
        "workers.num_gpus: 1 GPU for each actor, and this machine has no GPU",
        ("workers.num_gpus=1",),
        command="train-drafter",
    ),
)
OUTPUTS = (
    Mistake(
        "an output that is a file",
        "sink.path: {folder}/file is a file, and an output is a folder",
        ("sink.path={folder}/file",),
        {"file": "x"},
    ),
    Mistake(
        "an output below a file",
        "sink.path: {folder}/file/out is below the file {folder}/file",
        ("sink.path={folder}/file/out",),
        {"file": "x"},
    ),
    Mistake(
        "an output with files of others",
        "sink.path: {folder}/out is not empty: it holds notes.txt, which no job wrote",
        (),
        {"out/notes.txt": "x"},
    ),
    Mistake(
        "an output with data of others",
        "sink.path: {folder}/out is not empty: it holds data/part.parquet",
        (),
        {"out/data/part.parquet": "x"},
    ),
    Mistake(
        "an output that is not writable",
        "sink.path: {folder}/out cannot be written: {folder} is not writable for this user",
        environment=READ_ONLY,
    ),
    Mistake(
        "an output inside the source",
        "sink.path: the output is inside the source ({folder}/in/out and source.path {folder}/in)",
        ("sink.path={folder}/in/out",),
    ),
    Mistake(
        "a bucket that cannot be written",
        "sink.path: s3://mistakes/out cannot be written: Access Denied; choose another path, or give this user",
        ("sink.path=s3://mistakes/out",),
        environment=DENIED,
    ),
    Mistake(
        "a relative path in a submitted job",
        "source.path: in is relative, but the job runs from an uploaded working",
        ("source.path=in",),
        environment=SUBMITTED,
    ),
    Mistake(
        "a training into files of others",
        "output.path: {folder}/head is not empty; choose another folder",
        ("output.path={folder}/head",),
        {"head/notes.txt": "x"},
        command="train-drafter",
    ),
    Mistake(
        "a training into a file",
        "output.path: {folder}/file cannot be used: Not a directory",
        ("output.path={folder}/file",),
        {"file": "x"},
        command="train-drafter",
    ),
)
SOURCES = (
    Mistake(
        "a source that is not there",
        "source.path: {folder}/gone cannot be listed: it does not exist",
        ("source.path={folder}/gone",),
    ),
    Mistake(
        "a folder without files of its kind",
        "source.path: nothing to read at {folder}/empty; source.kind 'text' reads *.txt",
        ("source.path={folder}/empty",),
        {"empty/a.pdf": "x"},
    ),
    Mistake(
        "a column that is not there",
        "prompt.text: the column 'subject' is not in a file of lines; columns there: text",
        ("prompt='{subject}'",),
    ),
    Mistake(
        "a kept column that is not there",
        "sink.keep_columns: the column 'score' is not in a file of lines; columns there: text",
        ("sink.keep_columns=[score]",),
    ),
    Mistake(
        "a first sample of refused rows",
        "source.path: none of the first 2 rows can be used: rows.jsonl#0: missing_column_value: the prompt names the "
        "column 'text', which has no value",
        ("source.kind=jsonl", "source.path={folder}/rows.jsonl", "prompt='{text}'"),
        {"rows.jsonl": '{"text": null}\n{"text": null}\n'},
    ),
    Mistake(
        "images that are none",
        "source.path: the only row cannot be used: a.png#0: not_an_image",
        ("source.kind=images", "source.path={folder}/pictures", "prompt=Describe it."),
        {"pictures/a.png": "text"},
    ),
    Mistake(
        "no credentials for the source",
        "source.path: s3://mistakes/in cannot be opened: no credentials were found",
        ("source.path=s3://mistakes/in",),
        environment=NO_CREDENTIALS,
    ),
    Mistake(
        "no credentials for the output",
        "sink.path: s3://mistakes/out cannot be opened: no credentials were found",
        ("sink.path=s3://mistakes/out",),
        environment=NO_CREDENTIALS,
    ),
    Mistake(
        "a store whose port is closed",
        "source.path: s3://mistakes/in cannot be opened: connection refused 127.0.0.1",
        ("source.path=s3://mistakes/in",),
        environment=CLOSED_PORT,
    ),
    Mistake(
        "a store whose host is unknown",
        "source.path: s3://mistakes/in cannot be opened: unknown host store.example:80",
        ("source.path=s3://mistakes/in",),
        environment=UNKNOWN_HOST,
    ),
    Mistake(
        "a bucket of another region",
        "source.path: s3://mistakes/in cannot be opened: wrong region (PermanentRedirect); set AWS_DEFAULT_REGION",
        ("source.path=s3://mistakes/in",),
        environment=OTHER_REGION,
    ),
    Mistake(
        "a bucket that does not exist",
        "source.path: s3://gone/in cannot be opened: the bucket gone does not exist",
        ("source.path=s3://gone/in",),
        environment=NO_BUCKET,
    ),
)
MODELS = (
    Mistake(
        "a checkpoint that is not there",
        "model.target: {folder}/model: no such folder",
        ("model.target.path={folder}/model",),
    ),
    Mistake(
        "a drafter of another vocabulary",
        "model.drafter: zoo/checkpoints/caption_drafter does not share the target's vocabulary",
        ("model.drafter.path=zoo/checkpoints/caption_drafter",),
    ),
    Mistake(
        "an image model for captions",
        "model.target: zoo/checkpoints/image_target: transformers ",
        ("model.target.path=zoo/checkpoints/image_target",),
    ),
    Mistake(
        "a structure and stop texts",
        "sampling.stop: the structure of output decides where a text ends",
        ("output.regex=a", "sampling.stop=[b]"),
    ),
    Mistake(
        "a schema that is not JSON",
        "output.json_schema: {folder}/schema.json is not JSON: it is not valid JSON",
        ("output.json_schema={folder}/schema.json",),
        {"schema.json": "{'a': 1}"},
    ),
    Mistake(
        "an image job without its VQ model",
        "model.vq must name the VQ model that decodes images; or set sink.images: false",
        ("model.vq=null",),
        command="synthesize",
    ),
    Mistake(
        "a training with more warm-up than steps",
        "training: warmup_steps (500) must be fewer than num_steps",
        ("training.warmup_steps=500",),
        command="train-drafter",
    ),
)
