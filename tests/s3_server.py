"""A real S3 server process (moto behind werkzeug) that can be told to fail in the middle.

python s3_server.py PORT          GET /-/fail-parts?after=N makes every part upload after the N-th
                                  fail with 500 until GET /-/heal
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple


class Faulty:
    """The S3 application, with part uploads that fail on demand."""

    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.left: int | None = None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], parse_qs(environ["QUERY_STRING"])
        if path.startswith("/-/"):
            self.left = int(query["after"][0]) if path == "/-/fail-parts" else None
            start("200 OK", [("Content-Length", "0")])
            return [b""]
        if "partNumber" in query and self.left is not None:
            self.left -= 1
            if self.left < 0:
                # A broken upload: the body is never taken.
                start(
                    "500 Internal Server Error", [("Content-Length", "0"), ("Connection", "close")]
                )
                return [b""]
        return self.app(environ, start)


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), Faulty(), threaded=True)
