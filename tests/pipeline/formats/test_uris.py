"""Tests the limits of URIs in rows: allowed schemes, public hosts, bounded bytes, time and redirects."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator

import pytest

from configs.contexts import CaptionContextConfig
from configs.load import ConfigError, validate
from configs.schema import WeightsConfig
from configs.source import FetchConfig, SourceConfig
from pipeline.formats import uris, web
from pipeline.rows.schemas import RowError
from pipeline.storage import retries
from tests.pipeline.formats.web_server import BODY, WebServer, running
from tests.waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[WebServer]:
    with running() as web_server:
        yield web_server


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries.time, "sleep", lambda _: None)


def fetcher(root: object = "/nowhere", private: tuple[str, ...] = (), **options) -> uris.Fetcher:
    fetch = FetchConfig(
        private_hosts=private, **{name: options.pop(name) for name in ("timeout_s",) if name in options}
    )
    schemes = options.pop("schemes", ("http", "https"))
    source = SourceConfig(kind="parquet", path=str(root), uri_schemes=schemes, fetch=fetch, **options)
    return uris.Fetcher(source, str(root))


def outcome(uri_fetcher: uris.Fetcher, uri: str) -> bytes | str:
    """The bytes, or the error's code."""
    data = uri_fetcher.fetch([uri])[uri]
    return data.code if isinstance(data, RowError) else data


def test_many_uris_are_fetched_at_once_and_each_only_once(server: WebServer) -> None:
    names = [f"http://{server.host}/ok/{number % 20}" for number in range(60)]
    fetched = fetcher(private=("127.0.0.1",)).fetch(names)
    assert fetched == dict.fromkeys(names, BODY)
    assert [server.asked[f"/ok/{number}"] for number in range(20)] == [1] * 20


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("later/3", BODY),
        ("later/4", "unreadable_image"),
        ("cut/1", BODY),
        ("cut/9", "unreadable_image"),
        ("status/404", "missing_image"),
        ("status/410", "missing_image"),
        ("status/403", "unreadable_image"),
        ("status/500", "unreadable_image"),
        ("status/204", "unreadable_image"),
        ("claims/1001", "image_too_large"),
        ("endless/x", "image_too_large"),
        ("to//ok/redirected", BODY),
        ("loop/x", "uri_refused"),
        ("to/", "uri_refused"),
        ("to/file:///etc/passwd", "uri_refused"),
        ("to/ftp://127.0.0.1/x", "uri_refused"),
        ("to/http://localhost:1/x", "uri_refused"),
        ("to/http://169.254.169.254/latest/meta-data/", "uri_refused"),
        ("to///[::1]/x", "uri_refused"),
    ],
)
def test_answers_of_a_server_are_images_or_row_errors(server: WebServer, path: str, expected: bytes | str) -> None:
    uri_fetcher = fetcher(private=(server.host,), max_image_bytes=1000)
    assert outcome(uri_fetcher, f"http://{server.host}/{path}") == expected


def test_a_server_that_stalls_costs_its_time_and_no_more(server: WebServer) -> None:
    uri_fetcher = fetcher(private=(server.host,), timeout_s=1.0)
    error = uri_fetcher.fetch([f"http://{server.host}/stalls/x"]).popitem()[1]
    assert isinstance(error, RowError)
    assert error.code == "unreadable_image"
    until(lambda: server.asked["/stalls/x"] == 4)  # a busy server counts a request after its client has given up


def test_the_request_has_a_user_agent_and_no_credentials(server: WebServer) -> None:
    uri = f"http://user:secret@{server.host}/ok/a b?x=é y#part"
    assert outcome(fetcher(private=("127.0.0.1",)), uri) == BODY
    [(path, headers)] = [(path, headers) for path, headers in server.headers.items() if path.startswith("/ok/a")]
    assert path == "/ok/a%20b?x=%C3%A9%20y"
    assert headers["Host"] == server.host
    assert headers["User-Agent"] == "draftfleet"
    assert not [value for value in headers.values() if "secret" in value]


PRIVATE = [
    "http://127.0.0.1/x",
    "http://127.1/x",
    "http://2130706433/x",
    "http://0x7f.0.0.1/x",
    "http://0177.0.0.1/x",
    "http://0.0.0.0/x",
    "http://10.1.2.3/x",
    "http://172.16.0.1/x",
    "http://192.168.0.1/x",
    "http://100.64.0.1/x",
    "http://169.254.169.254/latest/meta-data/",
    "http://168.63.129.16/x",
    "http://224.0.0.1/x",
    "http://255.255.255.255/x",
    "http://[::]/x",
    "http://[::1]/x",
    "http://[::ffff:127.0.0.1]/x",
    "http://[::ffff:a9fe:a9fe]/x",
    "http://[64:ff9b::7f00:1]/x",
    "http://[2002:7f00:1::]/x",
    "http://[::127.0.0.1]/x",
    "http://[fe80::1]/x",
    "http://[fc00::1]/x",
    "http://localhost/x",
    "http://LOCALHOST/x",
    "http://example.com@127.0.0.1/x",
    "https://127.0.0.1/x",
    "http://127.0.0.1:22/x",
]
MALFORMED = ["http://", "http:///x", "http://[/x", "http://h:port/x", "http://a\0b/x", "http://" + "é" * 80 + "/x"]


@pytest.mark.parametrize("uri", [*PRIVATE, *MALFORMED])
def test_hosts_that_are_not_public_are_never_connected_to(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    def connect(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", connect)
    assert outcome(fetcher(), uri) == "uri_refused"


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = iter(["8.8.8.8", "127.0.0.1"])

    def resolve(host: str, port: int, **_: object) -> list[tuple]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    def connect(address: tuple[str, int], **_: object) -> None:
        asked.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert outcome(fetcher(), "http://rebinding.test/x") == "uri_refused"
    assert asked == ["8.8.8.8"]


def test_a_host_with_one_private_address_among_its_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    assert outcome(fetcher(), "http://both.test/x") == "uri_refused"


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_public(address: str) -> None:
    assert web.is_public(address)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("data:image/png;base64," + base64.b64encode(b"\x89PNG").decode(), b"\x89PNG"),
        ("data:,a%20b", b"a b"),
        ("DATA:;base64,QUJD", b"ABC"),
        ("data:image/png;base64", "invalid_value"),
        ("data:;base64,not base64!", "invalid_value"),
        ("data:;base64,QUJ", b"AB"),
        ("data:;base64,QUJDR", "invalid_value"),
        ("data:," + "x" * 1001, "image_too_large"),
        ("data:;base64," + "A" * 9999, "image_too_large"),
        ("data:,", b""),
    ],
)
def test_data_uris_hold_their_bytes(uri: str, expected: bytes | str) -> None:
    assert outcome(fetcher(schemes=("data",), max_image_bytes=1000), uri) == expected
    assert outcome(fetcher(), uri) == "uri_refused"


def test_paths_stay_below_the_root_and_the_folders_that_the_job_names(tmp_path) -> None:
    for name in ("root/a.bin", "other/b.bin", "other-secret/c.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name[-5:-4].encode())
    root, other = tmp_path / "root", str(tmp_path / "other")
    both, none = fetcher(root, schemes=("file",)), fetcher(root, schemes=())
    named = fetcher(root, schemes=("file",), local_roots=(other,))
    for uri_fetcher in (both, none, named):
        assert outcome(uri_fetcher, "a.bin") == b"a"
        assert outcome(uri_fetcher, "./x/../a.bin") == b"a"
        assert outcome(uri_fetcher, "../other/b.bin") == "uri_refused"
    for prefix in ("", "file://"):
        assert outcome(both, f"{prefix}{root}/a.bin") == b"a"
        assert outcome(both, f"{prefix}{root}/../other/b.bin") == "uri_refused"
        assert outcome(both, f"{prefix}{other}/b.bin") == "uri_refused"
        assert outcome(named, f"{prefix}{other}/b.bin") == b"b"
        assert outcome(named, f"{prefix}{other}-secret/c.bin") == "uri_refused"
        assert outcome(none, f"{prefix}{root}/a.bin") == "uri_refused"


def test_links_do_not_leave_the_root(tmp_path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a.bin").write_bytes(b"a")
    (tmp_path / "secret.bin").write_bytes(b"s")
    (tmp_path / "root/inside").symlink_to(tmp_path / "root/a.bin")
    (tmp_path / "root/outside").symlink_to(tmp_path / "secret.bin")
    (tmp_path / "root/folder").symlink_to(tmp_path)
    (tmp_path / "root/environ").symlink_to("/proc/self/environ")
    (tmp_path / "alias").symlink_to(tmp_path / "root")
    for root in (tmp_path / "root", tmp_path / "alias"):
        uri_fetcher = fetcher(root, schemes=("file",))
        assert outcome(uri_fetcher, "inside") == b"a"
        for uri in ("outside", "folder/secret.bin", "environ", f"file://{root}/outside"):
            assert outcome(uri_fetcher, uri) == "uri_refused"
    named = fetcher(tmp_path / "root", local_roots=(str(tmp_path),))
    assert outcome(named, "outside") == b"s"


def test_rows_of_a_remote_source_name_no_file_of_this_machine(tmp_path) -> None:
    (tmp_path / "a.bin").write_bytes(b"a")
    for roots, expected in (((), "uri_refused"), ((str(tmp_path),), b"a")):
        source = SourceConfig(kind="parquet", path="memory://in/rows.parquet", local_roots=roots)
        [got] = uris.Fetcher(source, "memory://in").fetch([f"file://{tmp_path}/a.bin"]).values()
        assert (got.code if isinstance(got, RowError) else got) == expected


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc here")
def test_only_regular_files_are_opened(tmp_path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    uri_fetcher = fetcher(tmp_path, schemes=("file",), local_roots=("/",))
    for uri in ("fifo", "folder", "file:///dev/zero", "file:///dev/tty", "/proc/self/environ", "/sys/kernel/notes"):
        assert outcome(uri_fetcher, uri) in ("unreadable_image", "missing_image")
    assert outcome(uri_fetcher, "/proc/self/environ") == "unreadable_image"


@pytest.mark.parametrize(
    "uri", ["%2e%2e/secret.png", "x/%2E%2E/%2e./secret.png", "..%2fsecret.png", "%2Fsecret.png", ".%2e"]
)
def test_escaped_dots_do_not_leave_a_root_on_the_web(server: WebServer, uri: str) -> None:
    server.files |= {"in/good.png": BODY, "secret.png": BODY}
    root = f"http://{server.host}/file/in"
    fetched = uris.Fetcher(SourceConfig(kind="parquet", path=f"{root}/rows.parquet"), root).fetch([uri, "good.png"])
    assert fetched["good.png"] == BODY
    refusal = fetched[uri]
    assert isinstance(refusal, RowError)
    assert refusal.code == "uri_refused"
    assert not [path for path in server.asked if "secret" in path]


@pytest.mark.parametrize("scheme", ["ftp", "sftp", "smb", "github", "memory", "simplecache", "jupyter", "S3", ""])
def test_schemes_of_more_than_files_are_refused(scheme: str) -> None:
    data = {"kind": "parquet", "path": "x", "uri_schemes": [scheme]}
    with pytest.raises(ConfigError, match="uri_schemes"):
        validate(SourceConfig, data, "job.yaml")


@pytest.mark.parametrize(
    "path",
    [
        "https://user:secret@host/x",
        "s3://key:secret@bucket/x",
        "https://host/x?X-Amz-Signature=secret",
        "https://h/x?sv=1&sig=secret",
    ],
)
@pytest.mark.parametrize("wrap", [lambda path: path, lambda path: ["fine", path]])
def test_credentials_in_a_path_are_refused_and_not_repeated(path: str, wrap) -> None:
    with pytest.raises(ConfigError, match="must not hold credentials") as caught:
        validate(SourceConfig, {"kind": "parquet", "path": wrap(path)}, "job.yaml")
    assert "secret" not in str(caught.value)


def test_credentials_in_the_path_of_a_model_are_refused_and_not_repeated() -> None:
    for section in (WeightsConfig, CaptionContextConfig):
        with pytest.raises(ConfigError, match="path: a URL must not hold credentials") as caught:
            validate(section, {"path": "https://user:secret@hub.example/model"}, "job.yaml")
        assert "secret" not in str(caught.value)
