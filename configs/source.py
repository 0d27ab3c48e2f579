"""Defines the section `source`: where samples come from, and the limits of rows, images and videos."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticKnownError

from configs.section import ExternalName, Section, without_credentials
from files.external_code import is_external

DEFAULT_NUM_FRAMES = 8


BuiltInKind = Literal[
    "parquet", "images", "videos", "webdataset", "jsonl", "json", "coco", "csv", "text", "hf", "lance"
]


def _known_kind(value: Any) -> str:
    """Accept the built-in kinds and names of external code; the message of another value lists the built-in ones."""
    kinds = get_args(BuiltInKind)
    if isinstance(value, str) and (value in kinds or is_external(value)):
        return value
    names = ", ".join(repr(kind) for kind in kinds[:-1])
    raise PydanticKnownError("literal_error", {"expected": f"{names} or {kinds[-1]!r}"})


SourceKindName = Annotated[str, PlainValidator(_known_kind, json_schema_input_type=BuiltInKind | ExternalName)]
"""A built-in source kind, or a `SourceKind` of a user's module."""


class VideoConfig(Section):
    """Sampling of frames from videos, the video decoder, and its limits."""

    decoder: Literal["auto", "decord", "pyav"] = "auto"
    """Video decoder: `auto`, which is PyAV, `pyav`, or `decord`, which refuses the videos of which it would return
    other frames."""
    square_pixels: bool = True
    """Whether videos with oblong pixels (DV, DVD, broadcasts) are resized as players show them; `false` keeps stored
    sizes."""
    on_damage: Literal["error", "keep"] = "error"
    """Videos that are cut short or damaged: `error` rows, or `keep` to use the frames before the damage, if there are
    any, at their own times; the column `partial_video` of the row then describes them."""
    report_partial: bool = True
    """Whether the output has the column `partial_video`; outputs that were begun before this key have not."""
    num_frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of evenly spaced frames of a clip, including its first and last frame; 8 if neither `fps` nor
    `timestamps_s` is set."""
    fps: Annotated[float, Field(gt=0.0, le=240.0)] | None = None
    """Frames per second, in place of `num_frames`."""
    max_frames: Annotated[int, Field(ge=1, le=4096)] = 64
    """Maximum number of frames of a clip sampled by `fps`; a longer one gets fewer frames per second."""
    timestamps_s: tuple[Annotated[float, Field(ge=0.0)], ...] = ()
    """Times of the frames in seconds, in place of `num_frames`."""
    clip_s: Annotated[float, Field(ge=0.1)] | None = None
    """Length of clips in seconds; each clip is one row. A remainder shorter than half a clip joins the last clip."""
    split: Literal["windows", "shots"] = "windows"
    """`shots` cuts videos at scene changes, each shot is one row; `windows` cuts them by `clip_s`, if that is set."""
    shot_threshold: Annotated[float, Field(gt=0.0, lt=100.0)] = 10.0
    """Minimum score of a scene change in percent, as of FFmpeg's detector; lower finds more cuts."""
    min_shot_s: Annotated[float, Field(ge=0.1)] = 1.0
    """Minimum length of a shot in seconds; a cut that would make a shorter shot is dropped."""
    max_shot_s: Annotated[float, Field(ge=0.1)] | None = None
    """Maximum number of seconds of a shot; a longer shot is cut into equal parts."""
    max_shots: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Maximum number of shots of a video; a video with more is a row error."""
    max_video_bytes: Annotated[int, Field(ge=1)] = 2 * 1024**3
    """Maximum number of bytes of a video file; a larger file is a row error."""
    max_decoded_bytes: Annotated[int, Field(ge=1)] = 1024**3
    """Maximum number of bytes of a video's sampled frames; a video that needs more is a row error."""
    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 60.0
    """Longest time to decode a video; a video that takes longer is a row error."""
    worker_max_videos: Annotated[int, Field(ge=1)] = 200
    """Number of videos after which the decoding process is replaced, because native decoders leak memory."""
    worker_max_bytes: Annotated[int, Field(ge=64 * 1024**2)] = 1024**3
    """Memory limit of the decoding process, excluding its libraries; the process is replaced at half of the limit."""

    @model_validator(mode="after")
    def _one_sampling(self) -> VideoConfig:
        if self.on_damage == "keep" and self.decoder == "decord":
            raise ValueError("on_damage 'keep' needs PyAV, which finds damage; leave decoder at auto")
        if self.on_damage == "keep" and not self.report_partial:
            raise ValueError("on_damage 'keep' needs report_partial, as rows of damaged videos must be known by it")
        given = [name for name in ("num_frames", "fps", "timestamps_s") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; frames are sampled in one way")
        if any(later <= earlier for earlier, later in zip(self.timestamps_s, self.timestamps_s[1:])):
            raise ValueError("timestamps_s must be in ascending order, none twice")
        if self.timestamps_s and self.clip_s is not None:
            raise ValueError("timestamps_s are moments of the whole video, so they do not go with clip_s")
        if self.split == "shots":
            if self.clip_s is not None or self.timestamps_s:
                raise ValueError("split 'shots' goes neither with clip_s nor with timestamps_s")
            if self.max_shot_s is not None and self.max_shot_s < 2 * self.min_shot_s:
                raise ValueError("max_shot_s must be at least 2 * min_shot_s, so that no part is shorter than that")
        return self

    @property
    def cuts(self) -> bool:
        """Whether a video may become several rows."""
        return bool(self.cut_by)

    @property
    def cut_by(self) -> str:
        """The key that cuts videos into rows; empty if none does."""
        return "split" if self.split == "shots" else "clip_s" if self.clip_s is not None else ""


class SourceColumnsConfig(Section):
    """Columns of the source that contain images or videos."""

    image: str | None = None
    """Parquet: encoded bytes, URIs, `struct<bytes, path>`, or lists of them; JSONL: URIs or lists; CSV: URIs; in tars,
    the extensions of the members that are images, such as `jpg` or `jpg;png`."""
    video: str | None = None
    """The same formats for videos; a row may have images and videos."""


UriScheme = Literal["file", "data", "http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf"]
"""Schemes of URIs in rows; the drivers of these schemes access only files."""


class FetchConfig(Section):
    """How media are fetched by URI."""

    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 30.0
    """Seconds of one attempt over http or https, redirects included."""
    max_attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Attempts at a URI, with growing waits; only transient errors are retried."""
    max_parallel: Annotated[int, Field(ge=1, le=256)] = 16
    """URIs that one decoding task fetches at once."""
    private_hosts: tuple[str, ...] = ()
    """Hosts (`name` or `name:port`) that may have private addresses; all others must be public."""


MAX_IMAGES_PER_ROW = 64
MAX_DECODED_BYTES = 1536 * 1024**2
SHARES = 6
"""Number of shares of `source.max_decoded_bytes`. Encoded rows, their pixels or processor outputs, and Ray's copy of
these take two shares each, because a task has rows of one share and one further row of at most one share."""

CIRCUMSTANCES = ("span_max_rows", "span_max_bytes", "fetch", "local_roots", "max_decoded_bytes")
VIDEO_CIRCUMSTANCES = ("worker_max_videos", "worker_max_bytes")
"""Keys of `source` and `source.video` that do not affect the output."""
OLDER = {
    "convert_to_srgb": False,
    "integral_ids": False,
    "companions": "show",
    "text_only_rows": "error",
    "final_answers": "error",
    "content_marks": "text",
}
"""Keys of `source` that older outputs do not have, with the values by which those outputs were read."""
VIDEO_OLDER = {"square_pixels": False, "report_partial": False}
"""The same for keys of `source.video`."""
ONLY_ERROR_ROWS = ("text_only_rows",)
VIDEO_ONLY_ERROR_ROWS = ("on_damage",)
"""Keys of `source` and `source.video` that decide only whether a row of a job is an error row, so that they may differ
between attempts."""
SHOTS = ("split", "shot_threshold", "min_shot_s", "max_shot_s", "max_shots")
"""Keys of `source.video` that outputs without shots do not have."""


def with_older(source: Any) -> Any:
    """Return the recorded section `source` of an output, with keys that it does not have at their older values."""
    if not isinstance(source, dict):
        return source
    video = source.get("video")
    return OLDER | source | ({"video": VIDEO_OLDER | video} if isinstance(video, dict) else {})


class SourceConfig(Section):
    """The input data: format, location, columns, and limits of its rows."""

    kind: SourceKindName
    """`parquet`, `images`, `videos` (files of a folder or glob), `webdataset` (tar shards), `jsonl`, `json` (arrays, as
    of LLaVA and ShareGPT), `coco` (annotations), `csv`, `text` (one prompt per line), `hf` (folders of Hugging Face's
    `datasets`), `lance` (where its library is installed), or a [format of yours](../guides/extend.md#formats) as
    `module:name`; see [sources](../guides/sources.md)."""
    path: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], AfterValidator(without_credentials)]
    """A file, folder or glob, as a local path or any fsspec URL; or a list of them in one store."""
    columns: SourceColumnsConfig = SourceColumnsConfig()
    id_column: str | None = None
    """The column (in tars: the field) with unique ids; if left out, ids are `path#index`."""
    check_ids: bool = True
    """Read all ids before the job starts, so that rows with repeated ids become error rows; ids in tars are checked at
    the end."""
    integral_ids: bool = True
    """Whether ids such as `1.0`, as pandas writes integers beside a gap, are the integers `1`; `false` keeps the text
    of CSV and tars."""
    text_only_rows: Literal["auto", "always", "error"] = "auto"
    """Rows without an image and video: `auto` asks them as text if their column has an empty list, or their
    conversation (`columns.messages`) has no place for one; `always`: also if it is null or blank; `error`: never."""
    final_answers: Literal["drop", "error"] = "drop"
    """Conversations that end with the assistant's turn, as rows for training do: `drop` leaves that turn out, so that
    the model answers; `error`: error rows."""
    content_marks: Literal["read", "text"] = "read"
    """`<image>` and `<video>` in texts of turns with `role` and `content`, as LLaMA-Factory writes them: `read` makes
    them the places of the row's images and videos, if there are as many of them and no other places; `text`: never."""
    companions: Literal["skip", "show"] = "skip"
    """Tars only: `skip` leaves out images that have a name of their own (`1.seg.png`, `1.depth.png`) beside one that
    has none (`1.jpg`); numbers are no names. `show`: all images of a sample. `columns.image` chooses members."""
    delimiter: Literal["auto"] | Annotated[str, Field(pattern=r"^[^\"\r\n]$")] | None = "auto"
    """CSV only: the field separator; `auto` is a tab in `.tsv` files and a comma in others, or the one of `,`, `;`, tab
    and `|` that fits the first records if that one does not, or that of a line `sep=`; `null` follows the suffix."""
    span_max_rows: Annotated[int, Field(ge=1)] = 1000
    """Maximum rows of one read task; a Parquet row group of small rows is not split up to 64 times this number."""
    span_max_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    """Maximum bytes of one read task. Parquet files are split at row groups and inside larger row groups, text files
    between records, and plain tars between samples; a compressed tar is one task."""
    uri_schemes: tuple[UriScheme, ...] = ("file",)
    """Schemes of URIs in rows (`file`, `data`, `http`, `https`, `s3`, `gs`, `gcs`, `az`, `abfs`, `abfss`, `hf`); a path
    without one is relative to the source root."""
    media_root: Annotated[str, Field(min_length=1), AfterValidator(without_credentials)] | None = None
    """The folder to which paths in rows are relative, itself relative to the source root (`../train2017`), or a local
    path or URL; the source root if left out."""
    local_roots: tuple[Annotated[str, Field(pattern="^/")], ...] = ()
    """Absolute paths of folders, besides the source root, in which rows and links may name local files."""
    fetch: FetchConfig = FetchConfig()
    max_image_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    """Maximum number of bytes of an image file; a larger file is a row error."""
    max_image_pixels: Annotated[int, Field(ge=1)] = 64_000_000
    """Maximum number of pixels of an image or a video frame; a larger one is a row error."""
    max_images_per_row: Annotated[int, Field(ge=1, le=10_000)] = MAX_IMAGES_PER_ROW
    """A row with more images is a row error."""
    max_side_px: Annotated[int, Field(ge=16)] | Literal["auto"] | None = "auto"
    """Longest side of images and frames; larger ones are resized during decoding. `auto` is a bound above the size that
    the target's processor uses; `null` disables resizing."""
    convert_to_srgb: bool = True
    """Convert the colours of images with an embedded profile or a named colour space to sRGB, as browsers do; `false`
    ignores both."""
    max_decoded_bytes: Annotated[int, Field(ge=16 * 1024**2)] = MAX_DECODED_BYTES
    """Memory of one decoding task for encoded and decoded images. Further rows go to other tasks; the images of one row
    may use a sixth of it."""
    video: VideoConfig = VideoConfig()

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def may_have_images(self) -> bool:
        """Whether rows may have images, besides those of conversations."""
        return self.kind in ("images", "webdataset") or is_external(self.kind) or self.columns.image is not None

    @property
    def may_have_videos(self) -> bool:
        """Whether rows may have videos: of files, tars, a column, or a format of the user's."""
        return self.kind in ("videos", "webdataset") or is_external(self.kind) or self.columns.video is not None

    def comparable(self, reads_images: bool, reads_videos: bool, has_conversations: bool = False) -> dict[str, Any]:
        """Return all keys as plain data, for a job that reads images, videos or conversations. A newer key is left out
        if it cannot affect this source, or has the value by which older outputs were read."""
        data = self.model_dump(mode="json")
        has_text_ids = self.kind in ("csv", "hf", "webdataset") or is_external(self.kind)
        affects = {
            "convert_to_srgb": reads_images,
            "integral_ids": self.id_column is not None and has_text_ids,
            "companions": self.kind == "webdataset",
            "text_only_rows": reads_images or reads_videos,
            "content_marks": has_conversations,
            "final_answers": False,  # only conversations, and of these only whether a row is an error row
        }
        for name, value in OLDER.items():
            if not affects[name] or data[name] == value:
                del data[name]
        if data["delimiter"] == "auto":
            data["delimiter"] = None  # differs for files only that could not be read before
        if data["media_root"] is None:
            del data["media_root"]
        video = data["video"]
        for name, value in VIDEO_OLDER.items():
            if not reads_videos or video[name] == value:
                del video[name]
        if not reads_videos or self.video.on_damage == "error":
            del video["on_damage"]
        return data

    def content(self, reads_images: bool, reads_videos: bool, has_conversations: bool = False) -> dict[str, Any]:
        """Return the keys of `comparable` that affect the results of a job."""
        data = self.comparable(reads_images, reads_videos, has_conversations)
        data = {name: value for name, value in data.items() if name not in (*CIRCUMSTANCES, *ONLY_ERROR_ROWS)}
        shots = SHOTS if self.video.split == "windows" else ()
        for name in (*VIDEO_CIRCUMSTANCES, *VIDEO_ONLY_ERROR_ROWS, *shots):
            data["video"].pop(name, None)
        return data

    @property
    def max_row_bytes(self) -> int:
        """Maximum number of bytes of one row's encoded images, and of their pixels."""
        return max(1, self.max_decoded_bytes // SHARES)


class JobOutputConfig(Section):
    """The output of a caption job, whose answers a drafter learns to predict."""

    kind: Literal["job_output"] = "job_output"
    """Trains on the answers in `data/`, with the source, prompt and columns that the job has recorded; the job must
    have `sink.keep_tokens`."""
    path: Annotated[str, AfterValidator(without_credentials)]
    """The output directory of the job, finished or running."""

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a tuple."""
        return (self.path,)
