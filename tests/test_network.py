"""No test reaches beyond this machine, in pytest or in a process it starts; what is local still may be reached."""

import socket
import subprocess
import sys

import httpx
import pytest

from tests.blocked import sitecustomize

TRIES = {
    "connection": lambda one: one.connect(("203.0.113.1", 443)),
    "connection, asking for a number": lambda one: one.connect_ex(("203.0.113.1", 443)),
    "datagram": lambda one: one.sendto(b"x", ("203.0.113.1", 53)),
    "look-up": lambda _: socket.getaddrinfo("huggingface.co", 443),
    "old look-up": lambda _: socket.gethostbyname("huggingface.co"),
    "hub": lambda _: httpx.get("https://huggingface.co/api/models"),
}


@pytest.mark.parametrize("attempt", TRIES.values(), ids=TRIES)
def test_what_leaves_this_machine_is_refused_and_written_down(attempt, reached_out):
    with socket.socket() as one, pytest.raises(Exception, match="tests do not reach beyond this machine"):
        attempt(one)
    assert reached_out.read_text().count("\n") == 1
    reached_out.write_text("")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (("127.0.0.1", 1), True),
        (("::1", 1, 0, 0), True),
        (("0.0.0.0", 0), True),
        (("", 0), True),
        (("localhost", 1), True),
        ("/run/a.socket", True),
        (b"\0abstract", True),
        (("10.0.0.1", 1), False),
        (("2001:db8::1", 1, 0, 0), False),
        (("127.0.0.1.example.org", 1), False),
    ],
)
def test_what_is_local(address, expected):
    assert sitecustomize.local(address) is expected


def test_a_process_that_a_test_starts_is_held_to_it_too_and_what_it_swallows_is_known(reached_out):
    code = "import socket\ntry: socket.getaddrinfo('huggingface.co', 443)\nexcept OSError: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "huggingface.co" in reached_out.read_text()
    reached_out.write_text("")
