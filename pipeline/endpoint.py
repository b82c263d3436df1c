"""Rollouts by a server that takes and returns token ids: llama-server or vLLM.

llama-server: POST /completion with `return_tokens`; vLLM: POST /v1/completions with
`return_token_ids`. A server that returns only text is refused: tokenising an answer again gives
other ids than the ones sampled, and what is then learnt is not the target model's own behaviour.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import requests

from pipeline.errors import IncompleteError, PipelineError, RowReject
from pipeline.manifest import Commit, RunFolder
from pipeline.models.base import Generation, Prompt, Sampling
from pipeline.models.load import find_target, load_tokenizer
from pipeline.rollout import longest_row, roll_out_part
from pipeline.tasks import RolloutTask, Task
from pipeline.worker import WorkerSpec, rollout_layout

ATTEMPTS = 6  # of one request; the waits between them double from one second
TIMEOUT_SECONDS = 600.0
_BUSY = (429, 500, 502, 503, 504)
_SEED_BITS = 32  # llama-server's seeds


class Endpoint:
    """One server; `generate` is a `pipeline.rollout.Generate`."""

    def __init__(
        self, url: str, *, eos_ids: frozenset[int], vocab_size: int, concurrency: int
    ) -> None:
        """Asks the server what it is. Raises PipelineError if it is neither kind."""
        self.url = checked_url(url)
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._concurrency = concurrency
        self._session = requests.Session()
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=concurrency)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)
        self.kind, self._model = self._what_is_it()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[Generation | RowReject]:
        """Answers in the order of the prompts; a refused request is that row's RowReject.

        Raises IncompleteError if the server stays out of reach, PipelineError if it returns text.
        """
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(lambda prompt: self._answer(prompt, sampling), prompts))

    def _answer(self, prompt: Prompt, sampling: Sampling) -> Generation | RowReject:
        try:
            if self.kind == "llama-server":
                said = self._post("/completion", _llama_request(prompt, sampling))
                return self._generation(said.get("tokens"), said.get("stop_type") == "eos", said)
            said = self._post("/v1/completions", _vllm_request(prompt, sampling, self._model))
            choice = said["choices"][0]
            return self._generation(
                choice.get("token_ids"), choice.get("finish_reason") == "stop", said
            )
        except RowReject as reject:
            return reject
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            return RowReject("endpoint_error", f"the answer lacks {error}")

    def _generation(
        self, ids: list[int] | None, stopped: bool, said: Mapping[str, Any]
    ) -> Generation:
        if not ids:
            raise PipelineError(
                f"--rollout-endpoint {self.url}: returns text without token ids; tokenising the "
                "text again would not give the ids that were sampled (not on-policy). It needs a "
                "llama-server with return_tokens or a vLLM with return_token_ids"
            )
        if said.get("truncated"):
            raise RowReject("endpoint_error", "the server cut the prompt to its own context")
        array = np.array(ids, dtype=np.int32)
        if array.min() < 0 or array.max() >= self._vocab_size:
            raise RowReject(
                "endpoint_error",
                f"id {array.max()} is outside the vocabulary of {self._vocab_size}: another model?",
            )
        ends = np.flatnonzero(np.isin(array, list(self._eos_ids)))
        if len(ends):  # what follows a terminator is not the answer's
            return Generation(array[: ends[0] + 1], "stop")
        if stopped:
            raise RowReject(
                "endpoint_error", "the answer ended, but its ids hold no end-of-sequence token"
            )
        return Generation(array, "length")

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RowReject if the server refuses this request, IncompleteError if it is gone."""
        trouble = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            try:
                answer = self._session.post(self.url + path, json=body, timeout=TIMEOUT_SECONDS)
            except requests.RequestException as error:
                trouble = type(error).__name__
                continue
            if answer.status_code in _BUSY:
                trouble = f"HTTP {answer.status_code}: {answer.text[:200]}"
                continue
            if answer.status_code != 200:
                raise RowReject("endpoint_error", f"HTTP {answer.status_code}: {answer.text[:200]}")
            said = answer.json()
            if not isinstance(said, dict):
                raise RowReject("endpoint_error", "the answer is not a JSON object")
            return said
        raise IncompleteError(
            f"--rollout-endpoint {self.url}: {ATTEMPTS} requests failed, last: {trouble}; what is "
            "committed stays, and the same command goes on from there"
        )

    def _what_is_it(self) -> tuple[Literal["llama-server", "vllm"], str]:
        try:
            if self._session.get(self.url + "/props", timeout=30).status_code == 200:
                return "llama-server", ""
            models = self._session.get(self.url + "/v1/models", timeout=30)
            if models.status_code == 200:
                return "vllm", str(models.json()["data"][0]["id"])
        except (requests.RequestException, ValueError, KeyError, IndexError, TypeError) as error:
            raise PipelineError(
                f"--rollout-endpoint {self.url}: {type(error).__name__}; is the server up?"
            ) from error
        raise PipelineError(
            f"--rollout-endpoint {self.url}: answers neither /props (llama-server) nor "
            "/v1/models (vLLM)"
        )


class EndpointExecutor:
    """Does rollout tasks in this process, with an endpoint in the target model's place."""

    def __init__(self, spec: WorkerSpec) -> None:
        settings = spec.settings
        assert settings.rollout_endpoint is not None
        self._spec = spec
        self._folder = RunFolder(settings.out)
        self._tokenizer = load_tokenizer(find_target(settings.target), settings.tokenizer)
        self._endpoint = Endpoint(
            settings.rollout_endpoint,
            eos_ids=spec.eos_ids,
            vocab_size=spec.geometry.vocab_size,
            concurrency=settings.rollout_concurrency,
        )

    def __call__(self, tasks: list[Task]) -> Iterator[Commit]:
        for task in tasks:
            assert isinstance(task, RolloutTask)
            yield roll_out_part(
                task,
                generate=self._endpoint.generate,
                eos_ids=self._spec.eos_ids,
                longest=longest_row(self._spec.settings, self._spec.geometry),
                tokenizer=self._tokenizer,
                layout=rollout_layout(),
                settings=self._spec.settings,
                folder=self._folder,
                footer=self._spec.rollout_footer,
            )


def _llama_request(prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
    """Only the samplers we ask for: llama-server's defaults would change the distribution."""
    return {
        "prompt": prompt.ids.tolist(),
        "n_predict": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "samplers": ["top_k", "top_p", "temperature"],
        "seed": prompt.seed % 2**_SEED_BITS,
        "return_tokens": True,
        "stream": False,
    }


def _vllm_request(prompt: Prompt, sampling: Sampling, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt.ids.tolist(),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": prompt.seed % 2**_SEED_BITS,
        "return_token_ids": True,
    }


def checked_url(url: str) -> str:
    """The URL without a trailing /v1. Raises PipelineError, without repeating secrets."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise PipelineError("--rollout-endpoint: must be an http:// or https:// URL")
    if "@" in parts.netloc or parts.query:
        raise PipelineError(
            "--rollout-endpoint: a URL with credentials in it would end up in logs and manifests"
        )
    return url.rstrip("/").removesuffix("/v1")
