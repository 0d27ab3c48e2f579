"""Describes errors of stores: what was wrong and what to do, in one sentence without credentials.

Errors of drivers are matched by the names of their classes and by their codes, because no driver is required. An error
is examined together with its causes, because drivers hide a closed port behind "does not exist".
"""

from __future__ import annotations

import errno
import itertools
import re
import socket
import ssl
from collections.abc import Iterator
from typing import NamedTuple

MAX_CAUSES = 12


class Store(NamedTuple):
    """A kind of store: the package of its driver, what names a user to it, and where its address comes from."""

    package: str
    credentials: str
    address: str = ""


_S3 = Store(
    "s3fs",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the environment",
    "AWS_ENDPOINT_URL and AWS_DEFAULT_REGION",
)
_GS = Store("gcsfs", "set GOOGLE_APPLICATION_CREDENTIALS to a key file", "STORAGE_EMULATOR_HOST")
_AZ = Store(
    "adlfs",
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ACCOUNT_NAME",
)
_HF = Store("huggingface_hub", "set HF_TOKEN in the environment", "HF_ENDPOINT")
_WEB = Store("aiohttp", "name files that are open to everybody")
_OTHER = Store("", "give them in the environment, as the driver reads it")
STORES = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZ),
    "hf": _HF,
    **dict.fromkeys(("http", "https"), _WEB),
}
_BY_MODULE = {"botocore": _S3, "aiobotocore": _S3, "gcsfs": _GS, "google": _GS, "azure": _AZ, "huggingface_hub": _HF}

_NO_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),  # botocore
    *("NoAuthTokenError", "TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"),
    *("DefaultCredentialsError", "RefreshError", "MalformedError"),  # google.auth
    *("ClientAuthenticationError", "CredentialUnavailableError"),  # azure
}
_WRONG_CREDENTIALS = {
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    *("RequestTimeTooSkewed", "InvalidSecurity", "AuthenticationFailed", "InvalidAuthenticationInfo"),
}
_OTHER_REGION = {
    *("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "Redirect"),
    "TemporaryRedirect",
}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_TIMEOUTS = {
    *("ConnectTimeoutError", "ReadTimeoutError", "ServerTimeoutError", "ConnectTimeout", "ReadTimeout"),
    *("ServiceResponseTimeoutError", "ServiceRequestTimeoutError", "TimeoutException"),
}
_DRIVERS = {
    *("aiobotocore", "botocore", "s3fs", "gcsfs", "google", "adlfs", "azure", "huggingface_hub", "fsspec"),
    *("aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"),
}
"""Packages whose errors are examined with their causes, besides those of the operating system."""
_UNREACHABLE_ERRNO = {
    *(errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    errno.EADDRNOTAVAIL,
}


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on, as a traceback shows them."""
    ids: set[int] = set()
    while error is not None and id(error) not in ids and len(ids) < MAX_CAUSES:
        ids.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status in a driver's error; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None)
    # Evaluated lazily: some drivers' errors warn when `code` is read.
    candidates = itertools.chain([status], (getattr(error, name, None) for name in ("status", "status_code", "code")))
    return next((status for status in candidates if isinstance(status, int) and 100 <= status < 600), None)


def is_unreachable(error: BaseException) -> bool:
    """Return whether no connection came about: the name is not resolved, or the host or its port does not answer."""
    return isinstance(error, socket.gaierror) or (
        isinstance(error, OSError) and not isinstance(error, TimeoutError) and error.errno in _UNREACHABLE_ERRNO
    )


def true_error(error: Exception) -> Exception:
    """Return the cause of a FileNotFoundError that a driver raises for any failure of a request; else the error."""
    if isinstance(error, FileNotFoundError):
        for cause in itertools.islice(causes(error), 1, None):
            status = status_of(cause)
            is_other = status not in (None, 404, 410) or is_unreachable(cause) or _is_timeout(cause)
            if is_other and isinstance(cause, Exception):
                return cause
    return error


def explain(error: BaseException, url: str = "") -> str:
    """Return what was wrong with the store at `url` and what to do; empty for errors that are not of a store."""
    errors = list(causes(error))
    store = _store_of(url, errors)
    is_inner = [not isinstance(cause, OSError) and _package_of(cause) not in _DRIVERS for cause in errors]
    for cause in errors[: 1 + next((index for index, ends in enumerate(is_inner) if ends), len(errors))]:
        if text := _explained(cause, store, url):
            return text
    if isinstance(error, ImportError) and store.package:
        return f"its driver is not installed; pip install {store.package}"
    if isinstance(error, PermissionError) and error.errno is None:  # of a driver; the system's has a number
        return _denied("", store)
    return ""


def _store_of(url: str, errors: list[BaseException]) -> Store:
    match = re.match(r"([A-Za-z][A-Za-z0-9+.\-]*)://", url)
    if match:
        return STORES.get(match.group(1).lower(), _OTHER)
    packages = map(_package_of, errors)
    return next((_BY_MODULE[name] for name in packages if name in _BY_MODULE), _OTHER)


def _package_of(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _explained(error: BaseException, store: Store, url: str) -> str:
    """Explain an error without its causes; errors of this program have their own messages."""
    if _package_of(error) == "pipeline":
        return ""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _NO_CREDENTIALS or "Must provide either a connection_string or account_name" in str(error):
        return f"no credentials were found ({type(error).__name__}); {store.credentials}"
    code = _code_of(error)
    if code in _NO_BUCKET:
        return f"the bucket {_bucket_of(url)}does not exist; correct its name, or create it"
    if code in _OTHER_REGION:
        return f"wrong region ({code}); set AWS_DEFAULT_REGION to the region of the bucket"
    if code in _WRONG_CREDENTIALS:
        return f"access denied, the credentials are not valid ({code}); {store.credentials}"
    if isinstance(error, ssl.SSLError) or "SSLError" in names:
        return f"the TLS connection fails ({_reason(error)}); check the address, and the certificates of this machine"
    if isinstance(error, socket.gaierror):
        return f"unknown host{_host_of(error)}: its name is not resolved; {_check_address(store)}"
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return f"connection refused{_host_of(error)}: the port is closed; {_check_address(store)}"
    if is_unreachable(error):
        reason = _reason(error)
        return f"the host cannot be reached{_host_of(error)} ({reason}); {_check_address(store)}"
    if _is_timeout(error):
        reason = f" ({_reason(error)})" if str(error) else ""
        search = f"; a driver without credentials searches for them: {store.credentials}" if store in (_GS, _AZ) else ""
        return f"it does not answer in time{reason}; {_check_address(store)}{search}"
    status = status_of(error)
    if status in (401, 403) or str(error).startswith("Forbidden: "):  # the latter of gcsfs
        return _denied(code or str(status or 403), store)
    if store is _S3 and (status in (301, 307) or "NoRegionError" in names):
        return f"wrong region ({status or 'none is set'}); set AWS_DEFAULT_REGION to the region of the bucket"
    if store is _S3 and status == 400 and code in ("400", "BadRequest"):  # an answer to HEAD has no reason
        return "wrong region, or an expired token (400); check AWS_DEFAULT_REGION and AWS_SESSION_TOKEN"
    return ""


def _denied(code: str, store: Store) -> str:
    detail = f" ({code})" if code else ""
    advice = store.credentials if store is _WEB else f"{store.credentials}, of a user with permission"
    return f"access denied{detail}; {advice}"


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or bool({kind.__name__ for kind in type(error).__mro__} & _TIMEOUTS)


def _code_of(error: BaseException) -> str:
    """Return the error code of S3 or Azure, such as `NoSuchBucket`; empty if there is none."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else getattr(error, "error_code", None)
    code = getattr(code, "value", code)
    return code if isinstance(code, str) else ""


def _bucket_of(url: str) -> str:
    match = re.match(r"[A-Za-z][A-Za-z0-9+.\-]*://(?:[^/?#]*@)?([^/?#]+)", url)
    return f"{match.group(1)} " if match else ""


def _host_of(error: BaseException) -> str:
    """Return host and port of a failed connection as text, as far as the error has them."""
    host, port = getattr(error, "host", None), getattr(error, "port", None)
    if not isinstance(host, str):
        return ""
    return f" {host}:{port}" if isinstance(port, int) else f" {host}"


def _check_address(store: Store) -> str:
    where = f" ({store.address})" if store.address else ""
    return f"check the address{where} and the network of this machine"


def _reason(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(str(reason).split())[:100] or type(error).__name__
