"""The settings of a run: the options of `jobs/extract_mtp.py`, each described once, here."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import typer
from pydantic import Field

from pipeline.errors import exit_on_error
from pipeline.layers import parse_features
from pipeline.prompt_settings import PromptSettings

# Settings that do not change a byte of the data files.
NOT_IN_FINGERPRINT = frozenset(
    {
        "out",
        "workers",
        "autoscale",
        "threads",
        "device",
        "gpus_per_worker",
        "max_reject_fraction",
        "no_progress_timeout",
        "verify_resume",
        "dry_run",
        "rollout_concurrency",
        "quiet",
        "log_json",
    }
)
# Settings that stand in the fingerprint by what they come to: content digests, backend used.
FINGERPRINTED_BY_CONTENT = frozenset(
    {"target", "prompts", "tokenizer", "chat_template", "backend", "rollout_endpoint", "layers"}
)

# Settings of one call rather than of the run: OUT/run.yaml leaves them out.
OF_THE_CALL = frozenset({"dry_run", "verify_resume", "quiet", "log_json"})


class Settings(PromptSettings):
    """All of them, with those of the prompts; field descriptions are the command line's help."""

    out: str = Field(
        description="Output directory (absolute under `ray job submit`) or URL: s3://bucket/path."
    )
    backend: Literal["auto", "llamacpp", "transformers"] = Field(
        "auto",
        description="What runs the target model. llamacpp: the very arithmetic that serves a GGUF; "
        "auto: llamacpp for a .gguf if it is installed, else transformers.",
    )
    features: str = Field(
        "mtp", description="Feature sets to extract, in one pass: mtp, dspark, eagle3, with commas."
    )
    layers: list[str] = Field(
        [],
        description="Blocks whose outputs a feature set holds, 0-based, not the usual ones: "
        "eagle3=1,14,26. Once for each set.",
    )
    max_new_tokens: int = Field(1024, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Sampling: temperature; 0 is greedy."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Sampling: nucleus mass; 1 keeps everything.")
    sampling_top_k: int = Field(
        0, ge=0, description="Sampling: the k likeliest tokens; 0 keeps everything."
    )
    stop: list[str] = Field(
        [],
        description="Text that ends an answer, wherever its tokens are cut; give it several times "
        "for several.",
    )
    samples_per_prompt: int = Field(
        1, ge=1, description="Answers to each prompt, drawn apart: rows ID/0, ID/1, …"
    )
    drop_unfinished: bool = Field(
        False, description="Reject rows whose last answer was cut by a length limit."
    )
    drop_degenerate: bool = Field(
        False, description="Reject rows whose last answer loops until it is cut."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of sampling and position shifts.")
    position_shift_max: int = Field(
        8192, ge=0, description="Largest random RoPE position shift of a row; 0 is none."
    )
    topk: int = Field(64, ge=1, le=4096, description="Teacher rows: how many likeliest tokens.")
    depth: int = Field(3, ge=1, le=16, description="Targets for k = 1..depth tokens ahead.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Dtype the target model runs in and its states are kept in."
    )
    kv_cache_dtype: Literal["float16", "float32"] = Field(
        "float16", description="llama.cpp's KV cache, and so the dtype K and V are kept in there."
    )
    batch_tokens: int = Field(4096, ge=1, description="Tokens of an extraction micro-batch.")
    rollout_rows: int = Field(32, ge=1, description="Conversations of a rollout part.")
    shard_mb: int = Field(512, ge=1, description="Size of a shard in MB, before compression.")
    workers: int = Field(0, ge=0, description="Actors at once; 0: one a GPU, else CPUs / threads.")
    autoscale: int = Field(
        0,
        ge=0,
        description="Ask the autoscaler of a Ray cluster for so many workers, begin with the first "
        "that comes and take in those that follow; 0: use what is there.",
    )
    threads: int = Field(1, ge=1, description="CPU threads of an actor.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where actors run the target model; auto: GPUs if the cluster has any."
    )
    gpus_per_worker: int = Field(
        1, ge=1, description="GPUs an actor spreads the target model over, if one is too small."
    )
    rollout_endpoint: str | None = Field(
        None,
        description="URL of a llama-server or vLLM that answers in the target model's place, by "
        "token ids.",
    )
    rollout_concurrency: int = Field(
        16, ge=1, description="Requests to --rollout-endpoint in flight."
    )
    max_reject_fraction: float = Field(
        0.01, ge=0, le=1, description="A complete run with more rejected rows exits with code 1."
    )
    no_progress_timeout: float = Field(
        300.0, gt=0, description="Seconds after which a worker that finishes nothing is reported."
    )
    verify_resume: bool = Field(
        False, description="On resume, read every finished file and check its sha256."
    )
    dry_run: bool = Field(
        False, description="Plan, measure a few rows, print the forecast, write nothing."
    )
    quiet: bool = Field(False, description="Say nothing but errors; the exit code tells the rest.")
    log_json: bool = Field(
        False, description="Progress, messages, errors and the summary as JSON lines on stderr."
    )

    @pydantic.field_validator("features")
    @classmethod
    def _in_order(cls, text: str) -> str:
        return ",".join(parse_features(text))

    def fingerprinted(self) -> dict[str, Any]:
        """The settings that change bytes of the data files."""
        return self.model_dump(exclude=set(NOT_IN_FINGERPRINT | FINGERPRINTED_BY_CONTENT))


Model = TypeVar("Model", bound=PromptSettings)


def with_settings(run: Callable[[Settings], None]) -> Callable[..., None]:
    """Make a typer command whose options are the fields of `Settings`; errors become exit codes.

    They may also come from --config and --set; see `pipeline.config_file`.
    """

    @functools.wraps(run)
    def command(*, context: typer.Context, **values: Any) -> None:
        from pipeline.config_file import merged

        with exit_on_error():
            config, assignments = values.pop("config"), values.pop("set")
            given = {
                name: value
                for name, value in values.items()
                if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
            }
            settings = Settings.check(
                **merged(config=config, assignments=assignments, command_line=given, model=Settings)
            )
        with exit_on_error(as_json=settings.log_json):
            run(settings)

    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ]
    for name, annotation, default, words in [*_options(), *_CONFIG_OPTIONS]:
        option = typer.Option("--" + name.replace("_", "-"), help=words)
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[annotation, option],
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


_CONFIG_OPTIONS: list[tuple[str, Any, Any, str]] = [
    (
        "config",
        str | None,
        None,
        "YAML file of these options, as `max_new_tokens: 512`; the command line wins over it.",
    ),
    ("set", list[str], [], "key=value, as a line of --config; wins over it. May be repeated."),
]


def _options() -> Iterator[tuple[str, Any, Any, str | None]]:
    """Name, type, default and help text of each setting's option."""
    for name, field in Settings.model_fields.items():
        if field.is_required():  # it may come from --config
            yield name, field.annotation | None, None, f"{field.description} Required."  # type: ignore[operator]
        else:
            default = field.get_default(call_default_factory=True)
            yield name, field.annotation, default, field.description


def with_options(
    kind: type[Model], *, arguments: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a typer command of `run(settings, …)`: the fields of `kind` become options, before the
    parameters that `run` has of its own.

    arguments: fields that are positional, each with its word in the usage line.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(run).parameters.values())[1:]

        @functools.wraps(run)
        def command(**values: Any) -> None:
            with exit_on_error():
                rest = {parameter.name: values.pop(parameter.name) for parameter in own}
                run(kind.check(**values), **rest)

        parameters = [_parameter(name, kind, arguments or {}) for name in kind.model_fields]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(
    name: str, kind: type[PromptSettings], arguments: Mapping[str, str]
) -> inspect.Parameter:
    field = kind.model_fields[name]
    if name in arguments:
        told: Any = typer.Argument(metavar=arguments[name], help=field.description)
    else:
        told = typer.Option("--" + name.replace("_", "-"), help=field.description)
    required = field.is_required()
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=... if required else field.get_default(call_default_factory=True),
        annotation=Annotated[field.annotation, told],
    )
