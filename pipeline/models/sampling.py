"""Token choice of one rollout, in numpy, the same for every backend.

A row's choices depend on its own logits and seed alone: each generated token takes exactly one
uniform number, in step order, from a counter-based generator keyed by the row's seed. So batch
mates, their order and the number of workers change nothing.
"""

import math

import numpy as np
import numpy.typing as npt

from pipeline.errors import PipelineError
from pipeline.models.base import Sampling

# Sorting a vocabulary of 262144 takes about 20 ms; the nucleus nearly always lies inside the few
# likeliest tokens, which partition finds in a tenth of that.
_LIKELY = 1024


def check_sampling(sampling: Sampling) -> None:
    """Raise PipelineError naming the first setting that is out of range."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise PipelineError(
            f"temperature must be a number >= 0 (0 is greedy), not {sampling.temperature}"
        )
    if not 0 < sampling.top_p <= 1:
        raise PipelineError(f"top_p must be in (0, 1] (1 keeps everything), not {sampling.top_p}")
    if sampling.top_k < 0:
        raise PipelineError(f"top_k must be >= 0 (0 keeps everything), not {sampling.top_k}")
    if sampling.max_new_tokens < 1:
        raise PipelineError(f"max_new_tokens must be at least 1, not {sampling.max_new_tokens}")


class RowSampler:
    """Chooses the tokens of one row.

    The rule: temperature 0 is arg-max, ties to the lower id. Else keep the top_k highest logits
    (ties at the border to the lower id), softmax of logits / temperature in float64, sort by
    falling probability (ties to the lower id), keep the smallest prefix whose mass reaches top_p,
    renormalise, and invert the cumulative distribution at one uniform number.
    """

    def __init__(self, seed: int, sampling: Sampling) -> None:
        """seed: 0 <= seed < 2**64. Raises PipelineError if a setting is out of range."""
        check_sampling(sampling)
        if not 0 <= seed < 2**64:
            raise PipelineError(f"a row's seed must lie in [0, 2**64), not {seed}")
        self._sampling = sampling
        self.greedy = sampling.temperature == 0
        self._uniform = np.random.Generator(np.random.Philox(key=seed))

    def __call__(self, logits: npt.NDArray[np.float32]) -> int:
        """logits: float32 [V], soft-cap applied -> the id of the next token.

        Raises PipelineError where the logits hold NaN or +inf, or no finite value at all.
        """
        best = int(np.argmax(logits))  # numpy returns the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise PipelineError(
                f"the target model's logits hold {logits[best]} at token id {best}: "
                "its weights or its numeric format are broken"
            )
        if self.greedy:
            return best
        u = float(self._uniform.random())
        ids = _top_k_ids(logits, self._sampling.top_k)
        shifted = logits[ids].astype(np.float64) - np.float64(logits[best])
        with np.errstate(over="ignore"):  # -inf is what a tiny temperature means
            weights = np.exp(shifted / self._sampling.temperature)
        return int(ids[_nucleus_choice(weights / weights.sum(), self._sampling.top_p, u)])


def _top_k_ids(logits: npt.NDArray[np.float32], top_k: int) -> npt.NDArray[np.intp]:
    """The ids of the top_k highest logits in rising order of id; all ids if top_k is 0."""
    size = logits.shape[0]
    if top_k == 0 or top_k >= size:
        return np.arange(size)
    border = np.partition(logits, size - top_k)[size - top_k]
    above = np.flatnonzero(logits > border)
    tied = np.flatnonzero(logits == border)[: top_k - above.shape[0]]
    return np.sort(np.concatenate([above, tied]))


def _nucleus_choice(probs: npt.NDArray[np.float64], top_p: float, u: float) -> int:
    """The index that u selects among the smallest prefix of mass >= top_p.

    probs: float64 [n] in rising order of id, sum 1.
    """
    size = probs.shape[0]
    if top_p < 1 and size > _LIKELY:
        # Every token tied with the border is kept, so this is a prefix of the full sort.
        likely = np.flatnonzero(probs >= np.partition(probs, size - _LIKELY)[size - _LIKELY])
        order = likely[np.argsort(-probs[likely], kind="stable")]
        cumulative = np.cumsum(probs[order])
        if cumulative[-1] < top_p:
            order = np.argsort(-probs, kind="stable")
            cumulative = np.cumsum(probs[order])
    else:
        order = np.argsort(-probs, kind="stable")
        cumulative = np.cumsum(probs[order])
    if top_p < 1:
        kept = int(np.searchsorted(cumulative, top_p, side="left")) + 1
        cumulative = cumulative[:kept]
    mass = cumulative[-1]
    place = int(np.searchsorted(cumulative, u * mass, side="right"))
    # u * mass may round up to mass: then the last token with any probability is meant.
    return int(order[min(place, int(np.searchsorted(cumulative, mass, side="left")))])
