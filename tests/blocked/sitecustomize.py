"""No test reaches beyond this machine: conftest imports this, and Python by its name in every process a test starts.

An audit hook sees each connection and each look-up of a name, whatever library makes it, and cannot be taken away.
What is refused is also written down, for a library may swallow the refusal and go on as if there were no network.
"""

import ipaddress
import os
import sys

LOG = "TESTS_REACHED_OUT"  # the file that attempts are written to
LOOK_UPS = {"socket.getaddrinfo": 0, "socket.gethostbyname": 0, "socket.gethostbyaddr": 0}
SENDING = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1}  # where the address stands


def local(address: object) -> bool:
    """A path (AF_UNIX), loopback, every interface of this machine, or this machine by name."""
    if not isinstance(address, tuple):
        return True
    host = address[0]
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if not host or host in ("localhost", "localhost.localdomain", os.uname().nodename):
        return True
    try:
        place = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return place.is_loopback or place.is_unspecified


def _refuse(event: str, arguments: tuple) -> None:
    if event in LOOK_UPS:
        address = (arguments[LOOK_UPS[event]],)
    elif event in SENDING:
        address = arguments[SENDING[event]]
    else:
        return
    if local(address):
        return
    said = f"{event} to {address!r}"
    if LOG in os.environ:
        with open(os.environ[LOG], "a", encoding="utf-8") as log:
            log.write(f"{said}\n")
    raise PermissionError(f"tests do not reach beyond this machine: {said}")


if not getattr(sys, "_llmgeom_blocked", False):
    sys._llmgeom_blocked = True
    sys.addaudithook(_refuse)
