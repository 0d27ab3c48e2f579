"""Damaged and hostile inputs, each with the codes that it may end with; the empty code is a row without an error.

Everything is made here, from fixed seeds, and nothing of it is large: what would be large is packed.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.pipeline.formats.shards import encode, tar_bytes
from tests.pipeline.media.video import damaged

OK = frozenset({""})
DAMAGED = frozenset({"", "broken_image", "not_an_image", "unsupported_image", "image_too_large"})
"""A flipped bit may hit something that does not matter, or a size."""


def codes(*names: str) -> frozenset[str]:
    return frozenset(names)


Cases = dict[str, tuple[bytes, frozenset[str]]]


# --- pictures ------------------------------------------------------------------------------------------------------


def picture(kind: str, mode: str = "RGB", size: tuple[int, int] = (24, 16), **options) -> bytes:
    """A picture with content, so that damage has something to hit."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    noise = np.random.default_rng(7).integers(0, 256, (size[1], size[0], channels), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise.squeeze(), mode if mode in ("RGB", "RGBA", "L", "CMYK") else None).save(
        buffer, kind, **options
    )
    return buffer.getvalue()


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")


def flipped(data: bytes, seed: int, count: int = 3, first: int = 0) -> bytes:
    content = bytearray(data)
    draw = random.Random(seed)
    for _ in range(count):
        content[draw.randrange(first, len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def png(
    width: int, height: int, *chunks: tuple[bytes, bytes], depth: int = 8, colour: int = 2, data: bytes = b""
) -> bytes:
    """A PNG of these chunks, checksums right, whatever its header claims."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def exif(orientation: int = 1, tail: bytes = b"", entries: int = 1, next_offset: int = 0) -> bytes:
    entry = struct.pack("<HHIHH", 0x0112, 3, 1, orientation & 0xFFFF, 0)
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", entries) + entry + struct.pack("<I", next_offset) + tail


def pictures() -> Cases:
    """Encoded pictures by name."""
    cases: Cases = {}
    for kind in FORMATS:
        whole = picture(kind)
        cases[f"whole {kind}"] = whole, OK
        for seed in range(3):
            cases[f"{kind} with flipped bits {seed}"] = flipped(whole, seed), DAMAGED
        for part in (4, 2):
            cases[f"{kind} cut to 1/{part}"] = whole[: len(whole) // part], DAMAGED
    zeros = zlib.compress(bytes(2**20), 9)
    packed = gzip.compress(bytes(2**20))
    cases |= {
        "PNG of 30000 x 30000": (png(30_000, 30_000, depth=1, colour=0, data=zeros), codes("image_too_large")),
        "PNG of 2 billion by 2 billion": (
            png(2**31 - 1, 2**31 - 1, data=zeros),
            codes("image_too_large", "broken_image"),
        ),
        "PNG of no pixels": (png(0, 0, data=zeros), codes("broken_image", "not_an_image")),
        "PNG with packed text": (
            png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**25), 9)), data=zlib.compress(bytes(52))),
            DAMAGED,
        ),
        "PNG with a packed profile": (
            png(4, 4, (b"iCCP", b"a\0\0" + zlib.compress(bytes(2**25), 9)), data=zlib.compress(bytes(52))),
            DAMAGED,
        ),
        "PNG with more data than pixels": (png(4, 4, data=zlib.compress(bytes(2**25), 9)), DAMAGED),
        "PNG without data": (png(4, 4), codes("broken_image")),
        "GIF of 65535 x 65535": (
            b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;",
            codes("image_too_large"),
        ),
        "JPEG of 65500 x 65500": (resized_jpeg(65_500, 65_500), codes("image_too_large")),
        "WebP of 16384 x 16384": (
            webp_header(16_384, 16_384),
            codes("image_too_large", "broken_image", "not_an_image"),
        ),
        "TIFF of 60000 x 60000": (tiff(60_000, 60_000), codes("image_too_large")),
        "TIFF whose directory is its own next": (tiff(4, 4, next_ifd=8), DAMAGED),
        "TIFF with a count of 4 billion": (tiff(4, 4, strip_count=2**32 - 1), DAMAGED),
        "a thread of 1 x 60000": (encode("red", (1, 60_000)), codes("unsupported_image")),
        "a thread of 60000 x 1": (encode("red", (60_000, 1)), codes("unsupported_image")),
        "CMYK": (picture("JPEG", "CMYK"), OK),
        "grey": (picture("PNG", "L"), OK),
        "alpha": (picture("PNG", "RGBA"), OK),
        "bilevel": (encode(1, (9, 9), mode="1"), OK),
        "16 bit grey": (sixteen_bit(), OK),
        "floating point": (floating(), codes("unsupported_image")),
        "Lab": (lab(), OK),
        "animated GIF": (animated("GIF"), OK),
        "animated WebP": (animated("WEBP"), OK),
        "animated PNG": (animated("PNG"), OK),
        "nothing": (b"", codes("not_an_image", "missing_image")),
        "one byte": (b"\x89", codes("not_an_image")),
        "zeros": (bytes(1000), codes("not_an_image")),
        "text": (b"hello", codes("not_an_image")),
        "a page": (b"<!doctype html><title>404</title>", codes("not_an_image")),
        "SVG with a script": (
            b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
            codes("not_an_image"),
        ),
        "PostScript": (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch /tmp/x) (w) file\n",
            codes("not_an_image"),
        ),
        "PDF": (b"%PDF-1.4\n1 0 obj<<>>endobj\ntrailer<<>>\n%%EOF", codes("not_an_image")),
        "an icon": (encode("red", (16, 16), "ICO"), codes("not_an_image")),
        "a zip": (b"PK\x03\x04" + bytes(60), codes("not_an_image")),
        "gzip": (packed, codes("not_an_image")),
        "a pickle": (b"cos\nsystem\n(S'touch /tmp/x'\ntR.", codes("not_an_image")),
        "a picture with a zip behind it": (picture("PNG") + b"PK\x03\x04" + bytes(500), OK),
    }
    for kind, magic in (
        ("JPEG", b"\xff\xd8\xff\xe0"),
        ("GIF", b"GIF89a"),
        ("WebP", b"RIFF\x10\0\0\0WEBPVP8 "),
        ("TIFF", b"II*\0"),
        ("BMP", b"BM"),
        ("JPEG 2000", b"\0\0\0\x0cjP  \r\n\x87\n"),
        ("AVIF", b"\0\0\0\x18ftypavif"),
    ):
        cases[f"{kind} of its magic alone"] = magic, codes("not_an_image", "broken_image")
    for name, block in (
        ("orientation 0", exif(0)),
        ("orientation 9", exif(9)),
        ("orientation 65535", exif(65_535)),
        ("a loop", exif(1, next_offset=8)),
        ("an entry count of 65535", exif(1, entries=65_535)),
        ("60 kB of noise", b"Exif\0\0" + random.Random(3).randbytes(60_000)),
        ("nothing in it", b"Exif\0\0"),
        ("an offset beyond its end", b"Exif\0\0II*\0\xff\xff\xff\xff"),
    ):
        cases[f"EXIF with {name}"] = picture("JPEG", exif=block), OK
    return cases


def resized_jpeg(width: int, height: int) -> bytes:
    data = bytearray(picture("JPEG"))
    position = data.index(b"\xff\xc0")
    data[position + 5 : position + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def webp_header(width: int, height: int) -> bytes:
    """A lossless WebP with a valid size in its header, followed by zeros."""
    sizes = (width - 1) | (height - 1) << 14
    body = b"\x2f" + struct.pack("<I", sizes) + bytes(200)
    chunk = b"VP8L" + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def tiff(width: int, height: int, next_ifd: int = 0, strip_count: int = 1) -> bytes:
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    tags += [(273, 4, strip_count, 200), (277, 3, 1, 1), (278, 4, 1, height), (279, 4, 1, 16)]
    body = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (b"II*\0" + struct.pack("<I", 8) + body + struct.pack("<I", next_ifd)).ljust(200, b"\0") + bytes(16)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def sixteen_bit() -> bytes:
    return saved(Image.fromarray(np.arange(0, 65_000, 650, np.uint16).reshape(10, 10)), "PNG")


def floating() -> bytes:
    return saved(Image.fromarray(np.linspace(0, 1, 100, dtype=np.float32).reshape(10, 10)), "TIFF")


def lab() -> bytes:
    return saved(Image.new("LAB", (8, 8)), "TIFF")


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:])


# --- URIs, prompts, ids --------------------------------------------------------------------------------------------

REFUSED = codes("uri_refused")
GONE = codes("missing_image", "unreadable_image")


def uris() -> dict[str, tuple[str, frozenset[str]]]:
    """URIs by name, for a source that allows file, data, http and https."""
    hosts = ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "10.0.0.1", "192.168.1.1", "169.254.169.254"]
    hosts += [
        "[::1]",
        "[::ffff:169.254.169.254]",
        "[fd00:ec2::254]",
        "localhost",
        "evil.example@127.0.0.1",
        "100.100.100.200",
    ]
    cases = {f"host {host}": (f"http://{host}/latest/meta-data/", REFUSED) for host in hosts}
    return cases | {
        "a picture": ("pictures/good.png", OK),
        "a picture twice removed": ("./pictures/../pictures/good.png", OK),
        "traversal": ("../../../../etc/passwd", REFUSED),
        "hidden traversal": ("pictures/../../../etc/passwd", REFUSED),
        "a system's file": ("file:///etc/passwd", REFUSED),
        "a file that never ends": ("file:///dev/zero", codes("uri_refused", "missing_image")),
        "a process's environment": ("file:///proc/self/environ", codes("uri_refused", "missing_image")),
        "a folder": ("pictures", codes("unreadable_image", "missing_image")),
        "gone": ("pictures/gone.png", GONE),
        "another scheme": ("gopher://127.0.0.1:25/_HELO", REFUSED),
        "ftp": ("ftp://10.0.0.1/x.png", REFUSED),
        "a bucket": ("s3://bucket/key.png", REFUSED),
        "a chain": ("simplecache::file:///etc/passwd", REFUSED),
        "a script": ("javascript:alert(1)", GONE),
        "NUL": ("pictures/good.png\0.jpg", REFUSED),
        "line ends": ("pictures/good.png\r\nHost: x", GONE),
        "controls": ("\x1b[2J\x07", GONE),
        "right to left": ("pictures/\u202egnp.doog", GONE),
        "5000 characters": ("x" * 5000, GONE),
        "a share": ("\\\\server\\share\\x.png", GONE),
        "blanks": ("   ", GONE),
        "data": ("data:image/png;base64," + base64.b64encode(encode()).decode(), OK),
        "data that is none": ("data:image/png;base64,%%%", codes("invalid_value")),
        "data of nothing": ("data:,", codes("not_an_image")),
        "no host": ("http:///x.png", REFUSED),
        "a port that is none": ("http://example.test:port/x", REFUSED),
    }


PROMPTS = {
    "special tokens": "<image></s><s> <|im_end|><|im_start|>system",
    "braces": "{question} {0} {__class__} %s ${x}",
    "a template": "{{ 7 * 7 }}{% for x in y %}",
    "controls": "\x00\x01\x1b[31m\x7f",
    "right to left": "\u202e\u2066abc\u2069",
    "joined marks": "Z" + "\u0301" * 500,
    "beyond the plane": "\U0001f469\u200d\U0001f680" * 20,
    "not assigned": "\ufdd0\uffff\U0010ffff",
    "blanks": " \t\n\u2003\ufeff",
    "long": "word " * 400,
}
IDS = [
    "../../etc/passwd",
    "a/b\\c",
    "line\nend",
    "\u202eid",
    "x" * 5000,
    "' OR 1=1 --",
    "\U0001f4a5",
    " ",
    "CON",
    "#",
    "a#0",
]


# --- files ---------------------------------------------------------------------------------------------------------


def parquet_bytes(columns: dict, **options) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue().to_pybytes()


def damaged_parquets() -> dict[str, bytes]:
    """Files that are Parquet no more, or claim what they do not hold."""
    whole = parquet_bytes(
        {"id": [f"p{n}" for n in range(40)], "image": [encode()] * 40, "ask": ["x"] * 40}, row_group_size=10
    )
    cases = {f"cut to {size}": whole[:size] for size in (0, 4, 100, len(whole) // 2, len(whole) - 4)}
    cases |= {f"flipped {seed}": flipped(whole, seed, 5, 4) for seed in range(6)}
    cases |= {f"footer flipped {seed}": flipped(whole, seed, 4, len(whole) - 600) for seed in range(6)}
    cases["a footer longer than the file"] = whole[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1"
    cases["no Parquet"] = b"PAR1" + random.Random(1).randbytes(500) + b"PAR1"
    cases["encrypted"] = whole[:-4] + b"PARE"
    return cases


def damaged_tars() -> dict[str, bytes]:
    """Archives that are cut, flipped, packed or full of what no archive of samples should hold."""
    members = [
        (f"{n}.{end}", data) for n in range(6) for end, data in (("jpg", picture("JPEG")), ("json", b'{"n": 1}'))
    ]
    whole = tar_bytes(members)
    cases = {f"cut to {size}": whole[:size] for size in (0, 100, 512, 3000, len(whole) // 2, len(whole) - 10_000)}
    cases |= {f"flipped {seed}": flipped(whole, seed, 4) for seed in range(6)}
    cases |= {
        "packed beyond measure": gzip.compress(tar_bytes([(f"{n}.jpg", bytes(2**23)) for n in range(16)])),
        "a packed archive that is cut": gzip.compress(whole)[:-50],
        "two archives": whole + whole,
        "an archive in an archive": tar_bytes([("a.tar", whole), ("a.jpg", picture("JPEG"))]),
        "names that climb": tar_bytes([(f"{'../' * 9}etc/x{n}.jpg", picture("PNG")) for n in range(3)]),
        "names of controls": tar_bytes(
            [("\x1b[2J\n.jpg", picture("PNG")), ("\u202egpj.jpg", picture("PNG")), ("b.jpg", b"b")]
        ),
        "a name of 100000 characters": tar_bytes([("x" * 100_000 + ".jpg", picture("PNG"))]),
        "a sample that comes back": tar_bytes([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.png", b"3")]),
        "a member twice": tar_bytes([("a.jpg", b"1"), ("a.jpg", b"2")]),
        "empty members": tar_bytes([("a.jpg", b""), ("a.json", b""), ("b.jpg", b"")]),
        "nested JSON": tar_bytes([("a.jpg", picture("PNG")), ("a.json", b"[" * 100_000)]),
        "no archive": random.Random(2).randbytes(5000),
        **{
            f"a {name}": special_member(kind)
            for name, kind in (
                ("link", tarfile.SYMTYPE),
                ("hard link", tarfile.LNKTYPE),
                ("device", tarfile.CHRTYPE),
                ("pipe", tarfile.FIFOTYPE),
            )
        },
        "a header that claims gigabytes": claiming(tarfile.GNUTYPE_LONGNAME, 3 * 2**30) + whole,
        "a member that claims gigabytes": claiming(tarfile.REGTYPE, 3 * 2**30) + whole,
    }
    return cases


def special_member(kind: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    return buffer.getvalue()


def claiming(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("a.jpg")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def damaged_lines() -> list[bytes]:
    """JSONL lines that are no objects, or objects without content."""
    return [
        *(
            b"{",
            b"}",
            b"[]",
            b"null",
            b"1",
            b'"x"',
            b"{'a': 1}",
            b'{"a": 1,}',
            b"{} {}",
            b"\xff\xfe{}",
            b"\0",
            b'{"a": \x00}',
        ),
        *(
            b"[" * 50_000,
            b'{"a":' * 50_000,
            b"9" * 5000,
            b'{"ask": ' + b"1" * 5000 + b"}",
            b"NaN",
            b'{"ask": "\\ud800"',
        ),
        *(b"\xef\xbb\xbf{", b"\x1b[2J", b"<xml/>", b"id,ask", b"---", b"\x1f\x8b\x08"),
    ]


def write_rows(folder: Path) -> dict[str, frozenset[str]]:
    """A Parquet source of pictures, URIs, prompts and ids, with damaged files beside it; codes by id.

    Rows of damaged files are named by their path and are not among the ids.
    """
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures/good.png").write_bytes(encode())
    expected: dict[str, frozenset[str]] = {}
    rows: list[dict] = []

    def add(
        name: str, allowed: frozenset[str], ask: str = "What?", data: bytes | None = None, uri: str | None = None
    ) -> None:
        expected[name] = allowed
        rows.append({"id": name, "ask": ask, "image": {"bytes": data, "path": uri}})

    for name, (data, allowed) in pictures().items():
        add(f"picture: {name}", allowed, data=data)
    for name, (uri, allowed) in uris().items():
        add(f"uri: {name}", allowed, uri=uri)
    for name, ask in PROMPTS.items():
        add(f"prompt: {name}", codes("", "context_too_long", "prompt_refused"), ask=ask, uri="pictures/good.png")
    for name in IDS:
        add(name, OK, uri="pictures/good.png")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = {
        "id": [row["id"] for row in rows],
        "ask": [row["ask"] for row in rows],
        "image": pa.array([row["image"] for row in rows], kind),
    }
    (folder / "rows.parquet").write_bytes(parquet_bytes(table, row_group_size=50))
    for name, data in damaged_parquets().items():
        (folder / f"damaged {name}.parquet").write_bytes(data)
    return expected


def write_tars(folder: Path) -> int:
    """Damaged archives beside a whole one; how many there are."""
    folder.mkdir(parents=True)
    for name, data in damaged_tars().items():
        (folder / f"{name}.tar").write_bytes(data)
    (folder / "whole.tar").write_bytes(tar_bytes([(f"{n}.png", picture("PNG")) for n in range(3)]))
    return len(list(folder.iterdir()))


def write_lines(folder: Path) -> int:
    """Damaged lines between sound ones, in one file, and files that are damaged as a whole; the rows of the first."""
    folder.mkdir(parents=True)
    lines = damaged_lines()
    sound = json.dumps({"ask": "What?"}).encode()
    (folder / "lines.jsonl").write_bytes(b"\n".join(part for line in lines for part in (sound, line)) + b"\n")
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(b"{}\n" + bytes(2**27)))
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(sound * 100)[:-9])
    (folder / "noise.jsonl.zst").write_bytes(random.Random(4).randbytes(300))
    return 2 * len(lines)


def write_videos(folder: Path) -> dict[str, frozenset[str]]:
    """Damaged videos, files that are none, sound ones between them, and one that is to end its decoder; codes by id."""
    folder.mkdir(parents=True)
    cases = {name: (data, damaged.CODES | OK) for name, data in damaged.DAMAGED.items()}
    cases |= {name: (data, codes("not_a_video")) for name, data in damaged.NONE.items()}
    cases |= {name: (data, codes("broken_video", "no_video_stream")) for name, data in damaged.HEADER_ONLY.items()}
    cases |= {"a_sound_one": (damaged.MP4, OK), "mortal": (damaged.MP4, codes("decoder_died"))}
    cases |= {"mortals_neighbour": (damaged.MP4, OK), "zz_a_sound_one": (damaged.WEBM, OK)}
    for name, (data, _) in cases.items():
        (folder / f"{name}.mp4").write_bytes(data)
    return {f"{name}.mp4#0": allowed for name, (_, allowed) in cases.items()}


def all_cases() -> dict[str, list[str]]:
    """The names of all inputs by sort, for counting."""
    return {
        "pictures": list(pictures()),
        "URIs": list(uris()),
        "prompts": list(PROMPTS),
        "ids": IDS,
        "Parquet": list(damaged_parquets()),
        "tars": list(damaged_tars()),
        "lines": [repr(line) for line in damaged_lines()],
        "videos": [*damaged.DAMAGED, *damaged.NONE, *damaged.HEADER_ONLY],
    }


def rows_source(folder: Path) -> dict[str, Any]:
    """The source section for what `write_rows` has written."""
    return {
        "kind": "parquet",
        "path": str(folder),
        "columns": {"image": "image"},
        "id_column": "id",
        "uri_schemes": ["file", "data", "http", "https"],
        "fetch": {"timeout_s": 1.0, "max_attempts": 1},
    }
