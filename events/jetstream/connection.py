"""One NATS connection with the settings that every Headwater process uses: credentials, TLS, permission violations, the nearest server.

Files of credentials are named by settings and read again at each reconnect, so a renewed creds file needs no restart.

By itself a denied request would wait for its deadline, look like a slow server, and be retried without end. Here the violation
ends the wait, and is logged once per subject.

Servers on this machine are connected to first: a connection to another host is lost with that host, or with the way to it.
"""

import asyncio
import contextlib
import random
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import nkeys
import structlog
from nats.aio.client import DEFAULT_FLUSH_TIMEOUT, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION

from headwater.events.jetstream.deliveries import PLAIN_HEADERS, DeliveryParser, Reader, UnparsedHeaders
from headwater.events.ports import AccessDenied, LogError, LogUnavailable
from headwater.schemas import subjects
from headwater.schemas.names import NATS_PORT, is_loopback

LOOK_UP_S: Final = 1.0
"""How long names are looked up to order servers; what is not known by then counts as far."""


def own_address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches a server; empty if the server is on this machine. Nothing is sent. Raises `OSError`."""
    family, _, _, _, server_address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(server_address)
        own_address = str(probe.getsockname()[0])
    return "" if own_address == server_address[0] or is_loopback(str(server_address[0])) else own_address


def address_towards_any(urls: Iterable[str]) -> str:
    """`own_address_towards` all of these servers: empty if one of them is on this machine, or none can be looked up."""
    own_address = ""
    for url in urls:
        try:
            own_address = _towards(url)
        except (OSError, ValueError):
            continue  # whoever connects will say so
        if not own_address:
            break
    return own_address


async def nearest_first(urls: list[str]) -> list[str]:
    """Servers on this machine first, and the others in a random order, so that processes are spread over them."""
    others = random.sample(urls, len(urls))
    if len(others) < 2:
        return others
    try:
        async with asyncio.timeout(LOOK_UP_S):
            near = await asyncio.gather(*(asyncio.to_thread(_is_here, url) for url in others))
    except TimeoutError:
        return others
    return [url for _, url in sorted(zip(near, others, strict=True), key=lambda pair: not pair[0])]


def _is_here(url: str) -> bool:
    try:
        return not _towards(url)
    except (OSError, ValueError):
        return False


def _towards(url: str) -> str:
    parts = urlsplit(url.strip())
    return own_address_towards(parts.hostname or "", parts.port or NATS_PORT)


_CREDS_MARKS = ("BEGIN NATS USER JWT", "BEGIN USER NKEY SEED")


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Paths, empty where not used. A user with password, or a token, is given in the URL instead."""

    nkey_file: str = ""
    creds_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_first: bool = False

    def check(self) -> None:
        """Can the files still be used? Raises `AccessDenied` naming the invalid setting."""
        self.options("")

    def options(self, url: str) -> dict[str, Any]:
        """Arguments for `Client.connect`. Raises `AccessDenied` naming the invalid setting."""
        arguments: dict[str, Any] = {}
        if self.nkey_file and self.creds_file:
            raise AccessDenied("--nats-nkey-file and --nats-creds-file are two identities: set one")
        if self.nkey_file:
            _check_seed(self.nkey_file)
            arguments["nkeys_seed"] = self.nkey_file
        if self.creds_file:
            _check_creds(self.creds_file)
            arguments["user_credentials"] = self.creds_file
        context = self._context(url)
        if context is not None:
            arguments |= {"tls": context, "tls_handshake_first": self.tls_first}
        return arguments

    def _context(self, url: str) -> ssl.SSLContext | None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise AccessDenied("--nats-tls-cert and --nats-tls-key belong together: set both")
        if not (self.tls_ca or self.tls_cert or self.tls_first or url.startswith(("tls://", "wss://"))):
            return None
        for flag, path in (
            ("--nats-tls-ca", self.tls_ca),
            ("--nats-tls-cert", self.tls_cert),
            ("--nats-tls-key", self.tls_key),
        ):
            if path:
                _text(flag, path)
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
        except ssl.SSLError as error:
            raise AccessDenied(
                f"--nats-tls-ca {self.tls_ca}: contains no certificate in PEM format ({error.reason})"
            ) from error
        if self.tls_cert:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key)
            except ssl.SSLError as error:
                raise AccessDenied(
                    f"--nats-tls-cert {self.tls_cert}: is not a certificate in PEM format that matches "
                    f"--nats-tls-key {self.tls_key} ({error.reason})"
                ) from error
        return context


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise AccessDenied(
            f"{flag} {path}: {reason}; name a file that this user may read (`headwater nats-config` generates keys)"
        ) from error


def _check_seed(path: str) -> None:
    try:
        nkeys.from_seed(bytearray(_text("--nats-nkey-file", path).strip().encode()))
    except (nkeys.NkeysError, ValueError) as error:
        raise AccessDenied(
            f"--nats-nkey-file {path}: contains no nkey seed; a seed is one line that starts with SU"
        ) from error


def _check_creds(path: str) -> None:
    text = _text("--nats-creds-file", path)
    for mark in _CREDS_MARKS:
        # Without this marker nats-py would search the file without end.
        if mark not in text:
            raise AccessDenied(f"--nats-creds-file {path}: has no line with {mark!r}; is it a .creds file?")


# Permission violations: the server reports them out of band, and never replies to what it denied.

SUBJECTS_MAX = 1024
"""Bound on the subjects recorded as logged; beyond it one may be logged again."""

HINT = "give this process the key of its own kind, or its user this right (`headwater nats-config --help`)"

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)

_RANDOM = re.compile(r"(?<=\.)c?[0-9A-Za-z]{22}(?=\.|$)")
"""Ids that nats-py and cursors generate: the same violation has another one each time."""

_log = structlog.get_logger("headwater.nats")


class Violations:
    """The violations of one connection."""

    def __init__(self, connection: str, inbox: str) -> None:
        self._connection = connection
        self._inbox = inbox
        self._inbox_denied = False
        self._logged: set[tuple[str, str]] = set()
        self._waiting: dict[str, set[asyncio.Timeout]] = {}

    def note(self, error: Exception) -> bool:
        """Record an error of the server; False if it is not a permission violation."""
        match = _VIOLATION.search(str(error))
        if match is None:
            return False
        # nats-py converts the text to lower case.
        action, subject = match[1].lower(), match[2].lower()
        self._log_once(action, _RANDOM.sub("*", subject))
        if action == "publish":
            self._end(subject)
        elif subject.startswith(self._inbox.lower() + "."):
            # No reply can be received: end all waits.
            self._inbox_denied = True
            for key in list(self._waiting):
                self._end(key)
        return True

    def reconnected(self) -> None:
        """Forget violations of subscriptions: after a reconnect permissions may differ."""
        self._inbox_denied = False

    def _end(self, key: str) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self._waiting.pop(key, ()):
            scope.reschedule(now)

    def _reason(self, subject: str) -> str:
        denied = f"receiving replies on {self._inbox}.>" if self._inbox_denied else subject
        return f"the server denies {denied} to {self._connection!r}; {HINT}"

    def _log_once(self, action: str, subject: str) -> None:
        if (action, subject) in self._logged:
            return
        if len(self._logged) >= SUBJECTS_MAX:
            self._logged.clear()
        self._logged.add((action, subject))
        _log.error(
            "nats_permission_denied",
            action=action,
            subject=subject,
            connection=self._connection,
            hint=HINT,
        )

    @asynccontextmanager
    async def watch(self, subject: str) -> AsyncIterator[None]:
        """Around a request on `subject`: raises `AccessDenied` as soon as the server denies it."""
        if self._inbox_denied:
            raise AccessDenied(self._reason(subject))
        key = subject.lower()
        scope = asyncio.timeout(None)
        self._waiting.setdefault(key, set()).add(scope)
        try:
            async with scope:
                yield
        except (TimeoutError, LogError):
            # The request's own deadline is raised, and a reply received before any violation is returned.
            if scope.expired():
                raise AccessDenied(self._reason(subject)) from None
            raise
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(scope)
                if not waiting:
                    del self._waiting[key]


# The connection.

PENDING_BYTES_MAX = 16 * 1024 * 1024
"""Bytes buffered while disconnected; beyond that, publishing raises."""

CLOSE_S = 0.5

_REFUSALS = (
    "authorization violation",
    "authorization failed",
    "authentication expired",
    "authentication revoked",
)


class TlsNotOffered(NatsError):
    """The server does not offer TLS."""


class Connection(Client):
    """A client that records permission violations, never sends plain text where TLS is configured, and reconnects until it is closed.

    nats-py ends a connection for good when the server refuses it once, as it does where credentials have expired or changed, or
    where it has as many connections as it may. Here every refusal is followed by another attempt. A task that is cancelled while
    it awaits `request` or `flush` is cancelled on every Python (see `_Cancellable`).
    """

    def __init__(self, name: str, inbox: str, credentials: Credentials | None = None) -> None:
        super().__init__()
        self._label = name
        self._credentials = credentials or Credentials()
        self.violations = Violations(name, inbox)
        self._ps: DeliveryParser = DeliveryParser(self, self._parse_header_lines)

    @property
    def server(self) -> str:
        """Name and version of the server's software."""
        return f"nats-server {self._server_info.get('version', 'of unknown version')}"

    @property
    def greeting(self) -> dict[str, Any]:
        """What the server said of itself when it was reached (INFO)."""
        return dict(self._server_info)

    @property
    def address(self) -> str:
        """URL of the server that it is connected to, without secrets."""
        url = self.connected_url
        return without_secret(url.geturl()) if url is not None else ""

    @property
    def logged_in(self) -> bool:
        """Does the server require authentication?"""
        return bool(self._server_info.get("auth_required"))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """See `Client.request`."""
        with _Cancellable():
            return await super().request(subject, payload, timeout, old_style, headers)

    async def flush(self, timeout: int = DEFAULT_FLUSH_TIMEOUT) -> None:
        """See `Client.flush`."""
        with _Cancellable():
            await super().flush(timeout)

    async def subscribe_reader(self, subject: str, reader: Reader) -> Subscription:
        """Subscribe for a reader of a stream that limits what is in transit to it."""

        async def never(message: Msg) -> None:
            raise AssertionError(f"{message.subject} went past its reader")

        subscription = await self.subscribe(subject, cb=never)
        self._ps.readers[subscription._id] = reader
        return subscription

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._ps.readers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> Coroutine[Any, Any, None]:
        # Not `async`: all other messages take no detour.
        reader = self._ps.readers.get(sid)
        if reader is None:
            return super()._process_msg(sid, subject, reply, data, headers)
        return self._hand_over(reader, subject, reply, data, headers)

    async def _hand_over(
        self, reader: Reader, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        """What its parser did not hand over itself: statuses, and the deliveries behind them."""
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        parsed = await self._process_headers(headers)
        # A stored message may have any header, also one that looks like a status.
        if reply.startswith(b"$JS.ACK"):
            reader.take_delivery(subject.decode(), reply.decode(), data, parsed)
        elif parsed and "Status" in parsed:
            await reader.take_status(parsed)

    async def _process_headers(self, headers: bytes | None) -> Any:
        # A status of the server stands behind the version, and is what its receiver asks for first.
        if headers is None or not headers.startswith(PLAIN_HEADERS):
            return await super()._process_headers(headers)
        return UnparsedHeaders(headers[len(PLAIN_HEADERS) :], self._parse_header_lines)

    async def _process_err(self, err_msg: str) -> None:
        if any(fragment in err_msg for fragment in (STALE_CONNECTION, PERMISSIONS_ERR)):
            await super()._process_err(err_msg)
            return
        error = NatsError(f"nats: {err_msg}")
        self._err = error
        if self._current_server is not None:
            # Without it the next attempt would follow at once, and the one after that.
            self._current_server.last_attempt = time.monotonic()
        await self._error_cb(error)
        await self._process_op_err(error)

    def _connect_command(self) -> bytes:
        try:
            self._credentials.check()
            command: bytes = super()._connect_command()
        except Exception as error:
            # nats-py continues its attempts after errors of its own only. A key file may be missing while it is replaced.
            raise NatsError(str(error)) from error
        return command

    async def note_loss(self) -> None:
        """The server is gone."""
        if not (self.is_closed or self.is_draining):
            _log.warning("nats_disconnected", connection=self._label)

    async def note_return(self) -> None:
        """It is there again, or another one of its cluster."""
        self.violations.reconnected()
        _log.info("nats_reconnected", connection=self._label)

    async def close(self) -> None:
        """See `Client.close`. Without a server, what is still to be sent is dropped.

        nats-py writes it to the transport that was lost, where uvloop raises `RuntimeError`.
        """
        if not self.is_connected:
            self._pending, self._pending_data_size = [], 0
        await super().close()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # Called before credentials are sent, on every reconnect too. nats-py would continue without TLS.
        if initial_connection and self.options.get("tls") and not info.get("tls_required"):
            raise TlsNotOffered
        await super()._process_info(info, initial_connection)


STAYING: Final[Mapping[str, Any]] = {
    "allow_reconnect": True,
    "max_reconnect_attempts": -1,
    "reconnect_time_wait": 1,
    "connect_timeout": 2,
    "ping_interval": 5,
    "max_outstanding_pings": 2,
    "pending_size": PENDING_BYTES_MAX,
}
"""How every connection stays connected: it reconnects without limit, and detects a dead peer within ten seconds."""


async def connect(
    url: str,
    name: str,
    *,
    inbox: str = "",
    credentials: Credentials | None = None,
    wait_s: float = 10.0,
) -> Connection:
    """Connect and stay connected: reconnects without limit, detects a dead peer within ten seconds.

    `url` may name several servers of one cluster, separated by commas; one on this machine is preferred. `inbox` is the prefix of the connection's
    reply subjects (see `subjects.inbox`); permissions depend on it. Raises `LogUnavailable`, with the URL, when no
    server answers within `wait_s`, and `AccessDenied` at once when authentication or TLS verification fails.
    """
    servers = [server.strip() for server in url.split(",") if server.strip()]
    where = ", ".join(map(without_secret, servers))
    ready = False

    async def on_error(error: Exception) -> None:
        if client.violations.note(error):
            return
        reason = _refusal(error)
        if reason and not ready:
            # Ends nats-py's own loop, which would retry without limit.
            raise AccessDenied(f"the NATS server at {where} {reason}") from error
        if reason:
            _log.error("nats_refused", reason=reason, connection=name)
        elif not isinstance(error, ConnectionError | asyncio.TimeoutError):
            _log.warning("nats_error", error=repr(error), connection=name)

    options = (credentials or Credentials()).options(",".join(servers))
    inbox = inbox or subjects.loose_inbox(name)
    client = Connection(name, inbox, credentials)
    try:
        # Without the deadline nats-py would retry without limit.
        async with asyncio.timeout(wait_s):
            await client.connect(
                await nearest_first(servers),
                dont_randomize=True,
                name=name,
                inbox_prefix=inbox,
                error_cb=on_error,
                disconnected_cb=client.note_loss,
                reconnected_cb=client.note_return,
                **STAYING,
                **options,
            )
            if not client.is_connected:
                raise ConnectionError("the server closed the connection")
    except (TimeoutError, OSError, NatsError) as error:
        last = client.last_error
        await _abandon(client)
        if isinstance(last, NatsError):
            raise LogUnavailable(f"the NATS server at {where} accepts no connection: {last}") from error
        raise _no_answer(where, wait_s) from error
    except BaseException:
        await _abandon(client)
        raise
    ready = True
    return client


def _no_answer(where: str, wait_s: float) -> LogUnavailable:
    return LogUnavailable(
        f"no NATS server answers at {where} within {wait_s:.0f} s; "
        "start one, or let `headwater up` start its own"
    )


@asynccontextmanager
async def watched(client: Client, *subjects: str) -> AsyncIterator[None]:
    """Around publishes whose reply is awaited: raises `AccessDenied` as soon as the server denies one of them.

    Other clients than `Connection` record no violations: with them the request waits for its deadline.
    """
    async with AsyncExitStack() as stack:
        if isinstance(client, Connection):
            for subject in subjects:
                await stack.enter_async_context(client.violations.watch(subject))
        yield


def without_secret(url: str) -> str:
    """`url` for display: without user, password or token."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in url else url


class _Cancellable:
    """A block that raises `CancelledError` if it ended or failed although this task was cancelled while it ran.

    nats-py awaits replies with `asyncio.wait_for`. On Python 3.11 it returns the result and drops a cancellation that
    arrives in the same iteration of the loop (python/cpython#86296): the task would run on, and who cancelled it would
    wait for it without end.
    """

    __slots__ = ("_before", "_task")

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "awaited outside a task"
        self._task = task
        self._before = task.cancelling()

    def __exit__(self, *_: object) -> None:
        if self._task.cancelling() > self._before:
            raise asyncio.CancelledError


async def _abandon(client: Client) -> None:
    """Close the socket and the tasks of a connection that failed.

    Under uvloop a transport whose TLS handshake failed never reports that it is closed.
    """
    with contextlib.suppress(OSError, NatsError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await client.close()


def _refusal(error: Exception) -> str:
    """Return what the server rejects, with the fix; empty for any other error."""
    text = str(error).lower()
    if isinstance(error, TlsNotOffered):
        return (
            "does not offer TLS, which is configured: give it a certificate, or omit --nats-tls-… and tls://"
        )
    if any(words in text for words in _REFUSALS):
        return (
            "rejects these credentials: check --nats-nkey-file, --nats-creds-file or the user in --nats, "
            "and that the server's nats.conf contains this user"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"presents a certificate that is not trusted ({error.verify_message}): "
            "name its authority with --nats-tls-ca, and use the host name in the certificate"
        )
    if isinstance(error, ssl.SSLError):
        return (
            f"does not agree on TLS ({error.reason or error}): check --nats-tls-cert and --nats-tls-key, "
            "and --nats-tls-first"
        )
    return ""
