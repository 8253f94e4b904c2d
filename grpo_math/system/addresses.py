"""Addresses of servers: the URL of a host and a port, and checks of hosts and URLs."""

import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

# Reason and remedy of an error about an address.
NO_ADDRESS = (
    "is not an address",
    "write it as http://127.0.0.1:8000, without a user or password: a key goes into VLLM_API_KEY",
)


def server_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on ``host``.

    >>> server_url("0.0.0.0", 8000), server_url("10.0.0.0", 8000), server_url("node1", 80)
    ('http://127.0.0.1:8000', 'http://10.0.0.0:8000', 'http://node1:80')
    >>> server_url("::1", 8000), server_url("::", 8000), server_url("[fe80::1%eth0]", 8000)
    ('http://[::1]:8000', 'http://[::1]:8000', 'http://[fe80::1%eth0]:8000')
    """
    ip = _ip(host)
    if ip is None:
        return f"http://{host}:{port}"
    # 0.0.0.0 and :: are all interfaces, and not addresses to connect to.
    if ip.is_unspecified:
        ip = ip_address("127.0.0.1" if ip.version == 4 else "::1")
    return f"http://{ip}:{port}" if ip.version == 4 else f"http://[{ip}]:{port}"


def is_loopback(host: str | None) -> bool:
    """Return True if no other machine reaches a server that listens on ``host``.

    >>> [is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]")]
    [True, True, True, True, True]
    >>> [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.0", "node1", "fe80::1%eth0", None)]
    [False, False, False, False, False, False]
    """
    ip = _ip(host)
    return host == "localhost" or (ip is not None and ip.is_loopback)


def is_this_machine(host: str | None) -> bool:
    """Return True if a client on this machine reaches a server on this machine at ``host``.

    >>> [is_this_machine(host) for host in ("localhost", "::1", "0.0.0.0", "::", "10.0.0.0", "node1")]
    [True, True, True, True, False, False]
    """
    ip = _ip(host)
    return is_loopback(host) or (ip is not None and ip.is_unspecified)


def address_towards(host: str) -> str | None:
    """Return the IPv4 address under which ``host`` reaches this machine; None if no route leads to the host.

    >>> address_towards("localhost"), address_towards("0.0.0.0"), address_towards("::1")
    ('127.0.0.1', '127.0.0.1', None)
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent over UDP here: the system only chooses the address. Any port will do.
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return None


def _ip(host: str | None) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        return ip_address((host or "").strip("[]"))
    return None  # a name


def is_address(url: str) -> bool:
    """Return True for http or https and a host. A user or a password in an address would be written down.

    >>> [is_address(url) for url in ("http://127.0.0.1:8000/v1", "http://ada:secret@host", "file:///x", "http://[::1")]
    [True, False, False, False]
    >>> is_address("http://host:99999"), is_address("http://no host")
    (False, False)
    """
    try:
        parts = urlsplit(url)
        # urlsplit checks a port only when the port is read.
        _ = parts.port
    except ValueError:  # half of an IPv6 address, or no port
        return False
    # urlsplit drops tabs and line ends, and accepts spaces and commas in a host.
    if set(url) & set(" ,\t\n"):
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
