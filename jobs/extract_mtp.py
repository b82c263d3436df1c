"""Extract drafter features with Ray: rollouts, then one teacher-forced pass, into Parquet shards.

python jobs/extract_mtp.py --target smollm2-135m --prompts prompts.jsonl --out OUT
ray job submit --working-dir . -- python jobs/extract_mtp.py … --out /abs/OUT
"""

import os
import signal
import sys
from pathlib import Path

import ray
import typer

ROOT = str(Path(__file__).resolve().parent.parent)  # of the packages `pipeline` and `jobs`
sys.path.insert(0, ROOT)

from jobs.ray_pool import RayPool, release_nodes
from pipeline.errors import PipelineError, run_program
from pipeline.execute import dry_run, execute
from pipeline.forecast import print_forecast
from pipeline.progress import RunProgress
from pipeline.run import Run
from pipeline.settings import Settings, with_settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def start_ray(*, submitted: bool) -> None:
    """Connect to the cluster of `ray job submit` or RAY_ADDRESS, or start a private one.

    Left to itself Ray joins whatever cluster last ran on this machine, and waits for minutes if
    that one is gone.
    """
    if submitted:  # the working directory is on every worker's path already
        ray.init(configure_logging=False)
        return
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        address=os.environ.get("RAY_ADDRESS", "local"),
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        **({} if "RAY_ADDRESS" in os.environ else {"include_dashboard": False}),
    )


def _stop(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


@app.command(
    epilog="Example: python jobs/extract_mtp.py --target smollm2-135m --prompts p.jsonl --out OUT"
)
@with_settings
def main(settings: Settings) -> None:
    """Let the target model answer prompts and dump the features that train its drafters."""
    submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if "://" not in settings.out:
        if submitted and not Path(settings.out).is_absolute():
            raise PipelineError(
                f"--out {settings.out}: must be absolute or a URL under `ray job submit`; the job "
                "runs in a temporary directory, and what it writes there is lost"
            )
        settings = settings.model_copy(update={"out": str(Path(settings.out).resolve())})

    with RunProgress(quiet=settings.quiet, log_json=settings.log_json) as progress:

        def ray_pool(run: Run) -> RayPool:
            # Only now, with the run planned: bad input needs no cluster to be told so.
            start_ray(submitted=submitted)
            # `ray job stop` sends SIGTERM; ray.init would put its own handler over an earlier one.
            signal.signal(signal.SIGTERM, _stop)
            return RayPool(run.spec, run.settings, progress.say)

        try:
            if settings.dry_run:
                told = dry_run(settings, ray_pool, progress)
            else:
                manifest = execute(settings, ray_pool, progress)
        finally:
            release_nodes(settings)
            ray.shutdown()
    if settings.dry_run:
        print_forecast(told, settings.out)
        return
    limit = settings.max_reject_fraction
    raise typer.Exit(progress.summary(manifest, settings.out, max_reject_fraction=limit))


if __name__ == "__main__":
    run_program(app)
