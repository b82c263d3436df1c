"""Quantise a GGUF file with llama.cpp's own quantiser."""

from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.models.llamacpp_library import library

_PREFIX = "LLAMA_FTYPE_MOSTLY_"


def quantisation_type(name: str) -> int:
    """llama.cpp's number of a file type such as `Q4_K_M`, in any case.

    Raises PipelineError for a name it does not know, or where llama-cpp-python is missing.
    """
    api = library().api
    number = getattr(api, _PREFIX + name.upper(), None)
    if not isinstance(number, int):
        known = sorted(key.removeprefix(_PREFIX) for key in vars(api) if key.startswith(_PREFIX))
        raise PipelineError(f"{name!r} is no quantisation of llama.cpp; it has {', '.join(known)}")
    return number


def quantise_gguf(source: Path, out: Path, name: str) -> None:
    """Write `out`, the file `source` quantised as `name`; `out` appears only once it is whole.

    Rows that a k-quant cannot cut into blocks of 256 get the type that llama.cpp falls back to.
    Raises PipelineError for an unknown name, or if llama.cpp refuses.
    """
    lib = library()
    params = lib.api.llama_model_quantize_default_params()
    params.ftype = quantisation_type(name)
    params.nthread = 1  # so small that threads would only wait for one another
    partial = out.with_name(f".{out.name}.partial")
    lib.log.last_words()  # forget older complaints
    try:
        if lib.api.llama_model_quantize(bytes(source), bytes(partial), params):
            raise PipelineError(
                f"{source}: llama.cpp cannot quantise it as {name}: {lib.log.last_words()}"
            )
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
