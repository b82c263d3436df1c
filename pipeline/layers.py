"""Feature sets of a run, and the decoder blocks whose outputs they hold. No torch here.

One convention everywhere: block i, 0-based, means the OUTPUT of decoder block i, which
transformers gives as hidden_states[i + 1] and others call the input of layer i + 1.
"""

from collections.abc import Callable, Mapping, Sequence

from pipeline.errors import PipelineError

FEATURE_SETS = ("mtp", "dspark", "eagle3")
LAYERED_SETS = ("dspark", "eagle3")  # those that hold block outputs
Layers = Mapping[str, tuple[int, ...]]


# Blocks that a released drafter was trained on where the rule gives others, by how the target
# model's architecture begins and its layers: deepseek-ai/dspark_gemma4_12b_block7.
PUBLISHED_DSPARK: Mapping[tuple[str, int], tuple[int, ...]] = {("gemma4", 48): (5, 17, 29, 41, 46)}


def dspark_layers(num_layers: int) -> tuple[int, ...]:
    """Five blocks evenly from 1 to num_layers - 3, ties of the rounding to the even block.

    DFlash's published rule; 36 layers give 1, 9, 17, 25, 33, the list of the Qwen3-4B drafters.
    """
    first, last = 1, num_layers - 3
    return tuple(round(first + i * (last - first) / 4) for i in range(5))


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high block; others name the same tensors inputs 2, n//2, n-3."""
    return 1, num_layers // 2 - 1, num_layers - 4


_RULES: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "dspark": dspark_layers,
    "eagle3": eagle3_layers,
}


def default_layers(name: str, num_layers: int, architecture: str) -> tuple[int, ...]:
    """The blocks of a feature set without --layers. Raises PipelineError for a shallow model."""
    if name == "dspark":
        for (family, layers), blocks in PUBLISHED_DSPARK.items():
            if architecture.startswith(family) and layers == num_layers:
                return blocks
    blocks = _RULES[name](num_layers)
    if sorted(set(blocks)) != list(blocks) or blocks[0] < 0 or blocks[-1] >= num_layers:
        raise PipelineError(
            f"--features {name}: the target model has {num_layers} layers, too few for the usual "
            f"blocks ({', '.join(map(str, blocks))}); name them: --layers {name}=0,1"
        )
    return blocks


def parse_features(text: str) -> tuple[str, ...]:
    """`mtp,eagle3` -> the sets, in their own order. Raises ValueError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FEATURE_SETS:
            raise ValueError(f"no feature set {name!r}; there are {', '.join(FEATURE_SETS)}")
        if names.count(name) > 1:
            raise ValueError(f"{name} is named twice")
    return tuple(name for name in FEATURE_SETS if name in names)


def choose_layers(
    features: Sequence[str], wanted: Sequence[str], *, num_layers: int, architecture: str
) -> Layers:
    """Feature set -> its blocks, rising; only the sets that hold block outputs.

    wanted: `--layers` texts, `eagle3=1,14,26`, or `1,14,26` where only one set takes layers; -1 is
    the last block, -2 the one before.
    Raises PipelineError for a set that takes none, a block out of range or named twice, and where
    a target model is too shallow for the default.
    """
    layered = [name for name in features if name in LAYERED_SETS]
    chosen: dict[str, tuple[int, ...]] = {}
    for text in wanted:
        name, equals, numbers = text.rpartition("=")
        if not equals and len(layered) == 1:
            name = layered[0]
        if name not in layered:
            raise PipelineError(
                f"--layers {text}: write SET=I,J,… with a set of --features that holds block "
                f"outputs ({', '.join(layered) or 'none of them does'})"
            )
        if name in chosen:
            raise PipelineError(f"--layers {text}: {name} is named twice")
        chosen[name] = _parse(text, numbers, num_layers)
    for name in layered:
        if name not in chosen:
            chosen[name] = default_layers(name, num_layers, architecture)
    return {name: chosen[name] for name in layered}


def _parse(text: str, numbers: str, num_layers: int) -> tuple[int, ...]:
    try:
        layers = [int(number) for number in numbers.split(",")]
    except ValueError:
        raise PipelineError(f"--layers {text}: not a list of numbers") from None
    for layer in layers:
        if not -num_layers <= layer < num_layers:
            raise PipelineError(
                f"--layers {text}: no block {layer}; the target model has 0 to {num_layers - 1} "
                "(block outputs, 0-based; -1 is the last)"
            )
    blocks = sorted(layer % num_layers for layer in layers)
    if len(set(blocks)) != len(blocks):
        raise PipelineError(f"--layers {text}: a block is named twice")
    return tuple(blocks)
