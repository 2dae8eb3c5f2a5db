"""The entry of the HTTP process."""

import functools
import logging
import socket
import sys
from pathlib import Path

import msgspec
import uvicorn

from engine.api.tokenizer import load_tokenizer
from engine.errors import UsageError
from engine.open_files import raise_file_limit
from engine.serve.app import make_app
from engine.serve.front import Front
from engine.serve.protocol import BoundedProtocol
from engine.serve.spec import HttpSpec

_BACKLOG = 4096
# Longer than the pools of common clients keep connections, so that none is closed under a request.
_KEEP_ALIVE_S = 75
_END_S = 5


def main(payload: bytes, fds: list[int]) -> None:
    """Serves HTTP until it is ended. payload: an HttpSpec in msgpack; fds: the bound
    socket, and where there is one that on which the supervisor sends `engine.serve.notices`.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s http %(message)s")
    spec = msgspec.msgpack.decode(payload, type=HttpSpec)
    raise_file_limit()
    link = socket.socket(fileno=fds[1]) if len(fds) > 1 else None
    try:
        front = Front(spec, load_tokenizer(Path(spec.model_dir)), link)
    except UsageError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{error.filename}: cannot make the KV folder: {error.strerror}")
    with socket.socket(fileno=fds[0]) as listener:
        make_server(front).run(sockets=[listener])


def make_server(front: Front) -> uvicorn.Server:
    protocol = functools.partial(BoundedProtocol, headers_timeout_s=front.spec.body_timeout_s)
    return uvicorn.Server(
        uvicorn.Config(
            make_app(front),
            http=protocol,  # type: ignore[arg-type]  # called like the class that it wraps
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_END_S,
            access_log=False,
            server_header=False,
            log_config=None,
        )
    )
