"""A small HTTP server of token ids around a loaded target model, in the two dialects we speak.

It answers `POST /completion` as llama-server does with `return_tokens`, and
`POST /v1/completions` as vLLM does with `return_token_ids`; modes make it misbehave.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from pipeline.models.base import Prompt, Sampling, TargetModel


class LlamaServer(ThreadingHTTPServer):
    """kind: llama-server or vllm; mode: "", text-only, busy-first, refuse-long, no-end."""

    daemon_threads = True

    def __init__(self, target: TargetModel, kind: str, mode: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.kind, self.mode = target, kind, mode
        self.lock = threading.Lock()  # one model, one request at a time
        self.requests: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: LlamaServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/props" and self.server.kind == "llama-server":
            self._send(200, {"model_path": "x.gguf"})
        elif self.path == "/v1/models" and self.server.kind == "vllm":
            self._send(200, {"data": [{"id": "the-model"}]})
        else:
            self._send(404, {"error": "not here"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.requests.append(body)
        if server.mode == "busy-first" and len(server.requests) <= 2:
            self._send(503, {"error": "loading model"})
            return
        if server.mode == "refuse-long" and len(body["prompt"]) > 60:
            self._send(400, {"error": "the request exceeds the available context size"})
            return
        llama = server.kind == "llama-server"
        sampling = Sampling(
            max_new_tokens=body["n_predict"] if llama else body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body["top_k"],
        )
        prompt = Prompt(np.array(body["prompt"], dtype=np.int32), body["seed"])
        with server.lock:
            ids, finish = server.target.generate([prompt], sampling)[0]
        tokens = ids.tolist()
        if server.mode == "text-only":
            tokens = []
        if server.mode == "no-end" and finish == "stop":
            tokens = tokens[:-1]
        if llama:
            said = {"content": "text", "tokens": tokens, "truncated": False}
            said["stop_type"] = "eos" if finish == "stop" else "limit"
        else:
            choice = {"text": "text", "token_ids": tokens, "finish_reason": finish}
            said = {"choices": [choice]}
        self._send(200, said)

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
