"""Draft vocabularies: which of the target's tokens a drafter's smaller head knows."""

from pipeline.vocab.build import DraftVocab, build_vocab, check_vocab, read_vocab
from pipeline.vocab.transitions import Transitions, count_transitions

__all__ = [
    "DraftVocab",
    "Transitions",
    "build_vocab",
    "check_vocab",
    "count_transitions",
    "read_vocab",
]
