"""Text that is not on this machine: any place that fsspec supports.

It is read by ranges, each of which is tried several times.
"""

import errno
import ftplib
import html
import io
import re
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar
from urllib.parse import urldefrag, urlsplit

from infini_llama.configs.errors import (
    ConfigError,
    PipelineError,
    shown_url,
    url_error_message,
)
from infini_llama.tasks.preprocess.sources.texts import Stamp

T = TypeVar("T")
TRIES = 5  # of one request
PAUSE = 0.5  # seconds before the second try, doubled for each further one
SILENT = 60.0  # seconds without a byte after which an HTTP connection is given up
BLOCK = 2**22  # bytes of one request of a file that is read in order
# Names of what stands for the bytes of a file, where it is known.
CONTENT = ("ETag", "etag", "md5Hash", "blob_id", "Content-MD5")
# Errors of a filesystem that connects when it is opened; they may pass.
TRANSIENT = (
    ConnectionError,
    TimeoutError,
    EOFError,
    socket.gaierror,
    ftplib.error_temp,
)
# Errors of a filesystem that takes the URL and cannot do what is requested of it. No subclasses: an
# answer that was cut short is no JSON.
NOT_TAKEN = (ValueError, NotImplementedError)
# Errors of botocore and google.auth, which need not be installed, for a user without an account.
WITHOUT_CREDENTIALS = {
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
}
# With its semicolon: an address that nothing escaped may have `&copy=`.
ESCAPE = re.compile(r"&#?\w+;")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True)
class RemoteFile:
    """One file by its URL.

    It includes the facts of a listing, so that no worker requests them again.
    """

    url: str
    # None: the server does not state it.
    size: int | None = field(default=None, compare=False)
    # None: the server gives none.
    stamp: Stamp | None = field(default=None, compare=False)
    is_page: bool = field(default=False, compare=False)  # the server says text/html

    def __str__(self) -> str:
        return shown_url(self.url)

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def place(self) -> str:
        """Its place in full, whatever its content."""
        return self.url

    def has_changed(self) -> bool:
        """Whether its server states another size or content than in the listing, or no file.

        False if the server does not state its content. Its facts are requested once.

        Raises:
            PipelineError: it is not reached, however often it is tried.
        """
        if self.stamp is None:
            return False
        files, path = filesystem(self.url)

        def current_info() -> dict[str, Any]:
            files.invalidate_cache(path)
            return files.info(path)

        try:
            now = _stamp_of(tried(self.url, current_info))
        except OSError:
            return True
        return now is not None and _without_quotes(now) != _without_quotes(self.stamp)

    def for_its_table(self) -> "RemoteFile":
        """The file for reading a table of its parts alone."""
        return self

    def open(self) -> IO[bytes]:
        """The file for reading, from any place.

        Raises:
            PipelineError: it is not reached, however often it is tried.
            OSError: it is not there, or may not be read.
        """
        if self.size is None:
            return self.copied()
        return io.BufferedReader(Ranges(self), BLOCK)

    def copied(self) -> IO[bytes]:
        """The whole file, on this machine's disk for as long as it is open."""
        files, path = filesystem(self.url)
        whole = tempfile.TemporaryFile()  # noqa: SIM115  its reader closes it

        def download() -> None:
            whole.seek(0)
            whole.truncate()
            files.get_file(path, whole)

        tried(self.url, download)
        whole.seek(0)
        return whole


class Ranges(io.RawIOBase):
    """A remote file whose every read is one request for exactly these bytes."""

    def __init__(self, file: RemoteFile) -> None:
        assert file.size is not None
        self._remote = file
        self._size = file.size
        self._place = 0
        files, path = filesystem(file.url)
        self._file: IO[bytes] = tried(
            file.url,
            lambda: files.open(path, "rb", cache_type="none", size=file.size),
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._place, self._size)[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        first = self._place
        last = min(first + len(buffer), self._size)
        if first >= last:
            return 0
        data = tried(self._remote.url, lambda: self._range(first, last))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _range(self, first: int, last: int) -> bytes:
        try:
            self._file.seek(first)
            data = self._file.read(last - first)
        except ValueError:  # fsspec's error for a server without range requests
            self._file = self._remote.copied()
            self._file.seek(first)
            data = self._file.read(last - first)
        if len(data) != last - first:
            raise OSError(f"only {len(data):,} of {last - first:,} bytes were received")
        return data


def is_remote(pattern: str) -> bool:
    return bool(SCHEME.match(pattern))


def filesystem(url: str) -> tuple[Any, str]:
    """The filesystem of a URL and the path in it.

    Credentials are those of the environment, or in the URL.

    Raises:
        ConfigError: the protocol is unknown, its package is not installed, or the URL is not one of
            its.
        PipelineError: the filesystem connects at once, and its server is not reached, however often
            it is tried.
    """
    import fsspec  # heavy, and needed for remote text alone

    settings: dict[str, Any] = {}
    if url.startswith("http"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(sock_connect=SILENT, sock_read=SILENT)
        settings["client_kwargs"] = {"timeout": timeout}

    def opened() -> tuple[Any, str]:
        try:
            if url.startswith("http"):
                _require_host(url)
            files, path = fsspec.core.url_to_fs(url, **settings)
        except TRANSIENT:
            raise
        except Exception as fault:  # every filesystem of fsspec has errors of its own
            raise _not_taken(url, fault) from None
        if url.startswith("http"):
            _unescape_links(files)
        return files, path

    return tried(url, opened)


def _unescape_links(files: Any) -> None:
    """Let a listing have the links of a page without HTML's escapes, which fsspec leaves there.

    Otherwise a folder with a `&` in its name would be left out, without an error.
    """
    list_page = type(files)._ls

    async def list_unescaped(url: str, detail: bool = True, **settings: Any) -> Any:
        entries = await list_page(files, url, detail=True, **settings)
        names = [
            ESCAPE.sub(lambda match: html.unescape(match[0]), entry["name"])
            for entry in entries
        ]
        if not detail:
            return names
        return [
            entry | {"name": name} for entry, name in zip(entries, names, strict=True)
        ]

    files._ls = list_unescaped


def _not_taken(url: str, fault: Exception) -> ConfigError:
    return ConfigError(
        f"{shown_url(url)} cannot be opened ({url_error_message(fault, url)}); "
        "correct the URL, or install what its filesystem needs."
    )


def _require_host(url: str) -> None:
    parts = urlsplit(url)
    # `port` raises an error for one that is out of range.
    if not parts.hostname or parts.port == 0:
        raise ValueError("it has no host, or port 0")


def tried(url: str, request: Callable[[], T]) -> T:
    """The result of `request`, which is repeated while it fails for a reason that may pass.

    Raises:
        FileNotFoundError, PermissionError: the server's answer for the file.
        ConfigError: the filesystem has no such request, or not of this URL.
        PipelineError: every try failed; the text is not known to be missing or bad.
    """
    fault: BaseException | None = None
    for number in range(TRIES):
        try:
            return request()
        except ConfigError:
            raise
        except Exception as error:  # every filesystem of fsspec has errors of its own
            if type(error) in NOT_TAKEN:
                raise _not_taken(url, error) from None
            fault = error
            if isinstance(error, FileNotFoundError) and error.__cause__:
                fault = error.__cause__
            status = _status(fault)
            # The latter from FTP.
            is_missing = isinstance(fault, FileNotFoundError | StopIteration)
            if status in (404, 410) or (is_missing and status is None):
                raise FileNotFoundError(
                    errno.ENOENT,
                    "there is no such file",
                    shown_url(url),
                ) from None
            refusal = _refusal(fault, status, url)
            if refusal:
                raise PermissionError(
                    errno.EACCES,
                    refusal,
                    shown_url(url),
                ) from None
            if number + 1 < TRIES:
                time.sleep(PAUSE * 2**number)
    reason = url_error_message(fault, url) if fault else ""
    raise PipelineError(
        f"{shown_url(url)} cannot be reached ({reason}); run the same command again."
    ) from None


def _refusal(fault: BaseException, status: int | None, url: str) -> str:
    """Why the server gives no access; "": it may give it."""
    if status in (401, 403) or isinstance(fault, PermissionError):
        return "the server refuses access; check the credentials"
    if type(fault).__name__ in WITHOUT_CREDENTIALS:
        return f"{url_error_message(fault, url)}; set the credentials"
    return ""


def _status(fault: BaseException) -> int | None:
    """The HTTP status that an error carries.

    The error is one of aiohttp, botocore (a mapping) or huggingface_hub (a response).
    """
    response = getattr(fault, "response", fault)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(response, "status_code", None) or getattr(response, "status", None)


def matching(pattern: str) -> tuple[bool, list[tuple[RemoteFile, str]]]:
    """Whether the pattern names a folder, and each file that it matches.

    With each file comes its path below the pattern's fixed part. As on a disk, * and ** match no
    name that begins with a dot.

    Raises:
        PipelineError: the listing fails, however often it is tried.
        PermissionError: it is refused.
        FileNotFoundError: a web server lists a file that it does not have.
    """
    files, path = filesystem(pattern)
    is_http = pattern.startswith("http")
    if is_http:
        # No server is sent the fragment, and it is no part of the name.
        pattern = urldefrag(pattern).url
        path = urldefrag(path).url
    # The beginning that the paths of its files lack: a protocol, and where the filesystem is of one
    # server, its name.
    forms = (pattern, pattern.rstrip("/"), f"{pattern}/")
    begin = next(
        (form.removesuffix(path) for form in forms if form.endswith(path)), None
    )
    files.invalidate_cache()
    path = path.rstrip("/")
    magic = re.search(r"[*\[]" if is_http else r"[*?\[]", path)

    def unless_missing(call: Callable[..., Any], place: str, **settings: Any) -> Any:
        try:
            return tried(pattern, lambda: call(place, **settings))
        except FileNotFoundError:
            return {}

    if magic:
        root = path[: magic.start()].rpartition("/")[0]
        entries = unless_missing(files.glob, path, detail=True)
        return False, _described(files, begin, entries, root, path, is_http)
    is_folder = pattern.endswith("/")
    info = {} if is_folder else unless_missing(files.info, path)
    if is_folder or info.get("type") == "directory":
        entries = unless_missing(files.find, path, detail=True)
        return True, _described(files, begin, entries, path, f"{path}/**", is_http)
    entries = {path: info} if info else {}
    root = path.rpartition("/")[0]
    return False, _described(files, begin, entries, root, path, is_http=False)


def _described(
    files: Any,
    begin: str | None,
    entries: dict[str, dict[str, Any]],
    root: str,
    pattern: str,
    is_http: bool,
) -> list[tuple[RemoteFile, str]]:
    """The files among the entries of a listing, each with its path below `root`.

    Args:
        begin: what the paths of the entries lack of their URLs; None: the filesystem adds it.
        pattern: names a hidden file only if it has a part that begins with a dot.
        is_http: the entries are those of a page of links, without facts of the files.
    """
    described: list[tuple[RemoteFile, str]] = []
    for path, listed in sorted(entries.items()):
        place = path.split("?")[0] if "://" in path else path
        name = place.removeprefix(root).lstrip("/")
        hidden = "/." not in pattern and any(
            part.startswith(".") for part in name.split("/")
        )
        if listed.get("type") != "file" or path.endswith("/") or hidden:
            continue
        info = tried(path, lambda path=path: files.info(path)) if is_http else listed
        size = None if info.get("partial") is False else info.get("size")
        stamp = _stamp_of(info)
        url = files.unstrip_protocol(path) if begin is None else begin + path
        is_page = info.get("mimetype") == "text/html"
        described.append((RemoteFile(url, size, stamp, is_page), name))
    return described


def _stamp_of(info: dict[str, Any]) -> Stamp | None:
    """The size of a file and what stands for its content; None: the server states no content."""
    content = tuple(str(info[key]) for key in CONTENT if info.get(key))
    return (info.get("size"), *content) if content else None


def _without_quotes(stamp: Stamp) -> Stamp:
    """The size and the first value of the content, without the quotes of an ETag.

    Azure has the quotes in the facts of one file, and not in a listing.
    """
    size, content, *_ = stamp
    return size, content.strip('"')
