"""Stores that cannot be used are refused before a job starts, with one sentence, soon, and without retries."""

from __future__ import annotations

import errno
import http.server
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import s3fs
import yaml
from fsspec.implementations.http import HTTPFileSystem

from configs.load import ConfigError
from jobs import caption, check, export, synthesize, train_drafter, verify, vocabulary
from pipeline.storage import access, first_touch, listing, retries
from pipeline.storage.failures import explain
from pipeline.storage.first_touch import bounded, check_stores
from tests.object_store import ACCESS_KEY, S3, SECRET_KEY, Fault, make_bucket

ROOT = Path(__file__).resolve().parents[3]
JOBS = {"caption": caption.main, "synthesize": synthesize.main, "train_drafter": train_drafter.main}
URL = re.compile(r"\b([a-z0-9]+)://[^\s'\"]+")


def kind_of(data: dict[str, Any]) -> str:
    if "output" in data and "sink" not in data:
        return "train_drafter"
    return "synthesize" if "condition" in data["model"] or "vq" in data["model"] else "caption"


def shipped() -> dict[str, Path]:
    """The first shipped job file of each kind of job and scheme of its source."""
    job_files: dict[str, Path] = {}
    for path in sorted((ROOT / "configs/jobs").glob("*.yaml")):
        data = yaml.safe_load(path.read_text())
        if match := URL.match(str(data["source"]["path"])):
            job_files.setdefault(f"{kind_of(data)}-{match[1]}", path)
    return job_files


SHIPPED = shipped()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drivers read the environment again, and no retry waits."""
    monkeypatch.setattr(retries, "DEFAULT_POLICY", retries.RetryPolicy(6, 0.0))
    before = dict(s3fs.S3FileSystem._cache)
    s3fs.S3FileSystem._cache.clear()
    yield
    for file_system in s3fs.S3FileSystem._cache.values():
        if file_system._s3 is not None:
            s3fs.S3FileSystem.close_session(file_system.loop, file_system._s3)
    s3fs.S3FileSystem._cache.clear()
    s3fs.S3FileSystem._cache.update(before)
    for web in HTTPFileSystem._cache.values():
        if web._session is not None:
            HTTPFileSystem.close_session(web.loop, web._session)
    HTTPFileSystem._cache.clear()


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))


@pytest.fixture
def closed_port(s3: S3, monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of the object store that the environment names, on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    point_to(f"http://127.0.0.1:{port}", monkeypatch)
    return port


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)  # as users have it


def refused(dotted: str, url: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_stores(dotted, [url])
    message = str(error.value)
    assert message.startswith(f"{dotted}: {url} cannot be opened: ")
    assert ACCESS_KEY not in message
    assert SECRET_KEY not in message
    return message


def one_line(output: Any) -> str:
    assert output.err.startswith("refused: ")
    assert output.err.count("\n") == 1
    return str(output.err)


# --- whole commands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SHIPPED)
@pytest.mark.usefixtures("no_credentials")
def test_shipped_jobs_refuse_missing_credentials_in_one_line(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = case.partition("-")[0]
    arguments = ["--config", str(SHIPPED[case])] + (["--dry-run"] if name != "train_drafter" else [])
    source = yaml.safe_load(SHIPPED[case].read_text())["source"]["path"]
    monkeypatch.setattr(first_touch, "connect", lambda address: None)
    assert JOBS[name](arguments) == 2
    line = one_line(capsys.readouterr())
    assert f"source.path: {source} cannot be opened: no credentials were found" in line
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in line


def test_the_shipped_jobs_have_these_kinds_of_stores() -> None:
    assert {case.partition("-")[2] for case in SHIPPED} == {"s3"}, "add the environment of the new store above"
    assert {case.partition("-")[0] for case in SHIPPED} == set(JOBS)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "check": (check.main, ["s3://out/run"]),
    "export": (export.main, ["--from", "s3://out/run"]),
    "verify": (verify.main, ["s3://out/run"]),
    "vocabulary": (vocabulary.main, ["--target", "zoo/checkpoints/caption_target", "--out", "x", "s3://out/run"]),
    "caption, sink": (caption.main, ["--config", "configs/jobs/zoo_caption.yaml", "sink.path=s3://out/run"]),
    "caption, weights": (
        caption.main,
        ["--config", "configs/jobs/zoo_caption.yaml", "model.target.path=s3://out/run", "sink.path=/nowhere/out"],
    ),
    "train, source": (
        train_drafter.main,
        ["--config", "configs/jobs/train_zoo_medusa.yaml", "source.path=s3://out/run", "output.path=/nowhere/out"],
    ),
    "train, answers": (
        train_drafter.main,
        ["--config", "configs/jobs/train_zoo_from_output.yaml", "source.path=s3://out/run", "output.path=/nowhere/out"],
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_no_command_takes_a_closed_port_for_a_missing_file(
    case: str, closed_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: pytest.fail("it is asked again"))
    main, arguments = COMMANDS[case]
    assert main(arguments) == 2
    line = one_line(capsys.readouterr())
    assert f"s3://out/run cannot be opened: connection refused 127.0.0.1:{closed_port}: the port is closed" in line
    assert "does not exist" not in line


# --- kinds of failures ---------------------------------------------------------------------------------------------


def test_a_host_without_an_address_is_unknown(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, *_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    point_to("http://store.example", monkeypatch)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    message = refused("sink.path", "s3://out/run")
    assert "unknown host store.example:80: its name is not resolved; check the address (AWS_ENDPOINT_URL" in message


def test_a_resolver_that_hangs_times_out(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    point_to("http://store.example", monkeypatch)
    monkeypatch.setattr(first_touch, "CONNECT_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(60))
    assert "it does not answer in time (no answer in 0.2 s)" in refused("sink.path", "s3://out/run")
    over.set()


def test_a_store_that_accepts_and_never_answers_times_out(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        point_to(f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch)
        monkeypatch.setattr(first_touch, "FIRST_TOUCH_S", 0.5)
        assert "it does not answer in time (no answer in 0.5 s)" in refused("sink.path", "s3://out/run")


def test_a_bucket_that_does_not_exist_is_named(s3: S3) -> None:
    make_bucket("exists")
    message = refused("sink.path", "s3://no-such-bucket/out")
    assert "the bucket no-such-bucket does not exist; correct its name, or create it" in message
    check_stores("sink.path", ["s3://exists/new/folder", "s3://exists/*.tar"])


def test_a_transient_refusal_of_a_store_is_retried(s3: S3) -> None:
    make_bucket("exists")
    with s3.failing(Fault("refuse", "HEAD", "exists", 2)):
        check_stores("source.path", ["s3://exists/in"])
        assert [fault.times for fault in s3.faults] == [0]


ANSWERS = {
    "another region": (301, "PermanentRedirect", "wrong region (PermanentRedirect); set AWS_DEFAULT_REGION"),
    "a signature for another region": (400, "AuthorizationHeaderMalformed", "wrong region (AuthorizationHeader"),
    "an unknown key": (403, "InvalidAccessKeyId", "access denied, the credentials are not valid (InvalidAccessKeyId)"),
    "a wrong key": (403, "SignatureDoesNotMatch", "the credentials are not valid (SignatureDoesNotMatch); set AWS_"),
    "an old token": (403, "ExpiredToken", "the credentials are not valid (ExpiredToken)"),
    "a user without permission": (403, "AccessDenied", "access denied (AccessDenied); set AWS_ACCESS_KEY_ID"),
}


@contextmanager
def answering(status: int, code: str) -> Iterator[str]:
    """A store that gives all requests one answer; to HEAD without its reason."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("x-amz-bucket-region", "eu-west-1")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("case", ANSWERS)
def test_refusals_of_a_store_are_explained(case: str, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    status, code, words = ANSWERS[case]
    with answering(status, code) as endpoint:
        point_to(endpoint, monkeypatch)
        assert words in refused("source.path", "s3://in/images")


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("az", "adlfs"), ("s3", "s3fs")])
def test_a_driver_that_is_missing_is_named(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    message = refused("source.path", f"{scheme}://in/images")
    assert f"its driver is not installed; pip install {package}" in message


def test_web_servers_that_are_closed_are_not_missing_files() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url = f"http://127.0.0.1:{port}/a.tar"
    assert "connection refused" in refused("source.path", url)
    filesystem, path = access.open_url(url, "source.path")
    with pytest.raises(OSError) as error:
        listing.is_file(filesystem, path)
    assert error.value.errno == errno.ECONNREFUSED


@pytest.mark.parametrize(("status", "words"), [(403, "access denied (403)"), (404, ""), (410, "")])
def test_forbidden_and_missing_files_of_web_servers_are_distinguished(status: int, words: str) -> None:
    with answering(status, "") as address:
        if words:
            assert words in refused("source.path", f"{address}/a.tar")
        else:
            check_stores("source.path", [f"{address}/a.tar"])


class DefaultCredentialsError(Exception):
    """As of google.auth."""


class HttpError(Exception):
    """As of gcsfs."""

    code = 401


class ClientAuthenticationError(Exception):
    """As of azure.core."""


class ResourceNotFoundError(Exception):
    """As of azure.core."""

    error_code = "ContainerNotFound"


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        (
            "gs://b/x",
            DefaultCredentialsError("none"),
            "no credentials were found (DefaultCredentialsError); set GOOGLE_",
        ),
        ("gs://b/x", HttpError("Anonymous caller"), "access denied (401); set GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs://b/x", OSError("Forbidden: b/x\nno access"), "access denied (403); set GOOGLE_APPLICATION_CREDENTIALS"),
        (
            "az://b/x",
            ClientAuthenticationError("none"),
            "no credentials were found (ClientAuthenticationError); set AZ",
        ),
        ("az://b/x", ResourceNotFoundError("none"), "the bucket b does not exist"),
        (
            "az://b/x",
            ValueError("unable to connect to account for Must provide either a connection_string or account_name"),
            "no credentials were found (ValueError); set AZURE_STORAGE_ACCOUNT_NAME",
        ),
        ("", FileNotFoundError(2, "No such file or directory"), ""),
        ("", PermissionError(13, "Permission denied"), ""),
        ("", ValueError("anything"), ""),
    ],
)
def test_errors_of_drivers_are_recognised_by_class_name(url: str, error: Exception, words: str) -> None:
    assert explain(error, url).startswith(words)
    assert bool(explain(error, url)) == bool(words)


# --- bounds --------------------------------------------------------------------------------------------------------


def test_only_a_running_job_waits_for_an_unreachable_store(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", waits.append)
    asked: list[Exception] = []

    def ask(error: Exception) -> None:
        asked.append(error)
        raise error

    def times(error: Exception) -> int:
        asked.clear()
        with pytest.raises(type(error)):
            retries.retried(lambda: ask(error), retries.RetryPolicy(4, 0.0))
        return len(asked)

    gone, busy = ConnectionRefusedError(111, "refused"), OSError(16, "Service Unavailable")
    with retries.planning():
        assert (times(gone), times(busy)) == (1, 4)
    assert (times(gone), times(busy)) == (4, 4)


def test_a_bounded_action_returns_raises_or_times_out() -> None:
    over = threading.Event()
    assert bounded(lambda: 5, 60.0) == 5
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 60.0)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.1 s"):
        bounded(lambda: over.wait(60), 0.1)
    over.set()


def test_no_retry_begins_after_the_deadline_of_a_first_request() -> None:
    def busy() -> None:
        raise OSError(16, "Service Unavailable")

    with pytest.raises(OSError, match="Service Unavailable"):
        bounded(lambda: retries.retried(busy, retries.RetryPolicy(3, 1e6, 1e6)), 60.0)
