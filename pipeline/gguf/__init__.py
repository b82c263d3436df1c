"""Strict GGUF loader: a GGUF file -> transformers configuration, weights and tokenizer."""

from pipeline.gguf.config import gguf_config
from pipeline.gguf.header import TensorInfo
from pipeline.gguf.reader import GGUFFile, read_gguf
from pipeline.gguf.tokenizer import gguf_tokenizer
from pipeline.gguf.vocab import gguf_eos_ids
from pipeline.gguf.weights import load_gguf_model

__all__ = [
    "GGUFFile",
    "TensorInfo",
    "gguf_config",
    "gguf_eos_ids",
    "gguf_tokenizer",
    "load_gguf_model",
    "read_gguf",
]
