"""Extract drafter features with Ray: rollouts, then one teacher-forced pass, into Parquet shards.

python jobs/extract_mtp.py --target smollm2-135m --prompts prompts.jsonl --out OUT
ray job submit --working-dir . -- python jobs/extract_mtp.py … --out /abs/OUT
"""

import os
import sys
from pathlib import Path

import ray
import typer

# Under `ray job submit` and in a plain checkout the package sits beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ray_pool import RayPool

from pipeline.errors import PipelineError, exit_on_error
from pipeline.progress import RunProgress
from pipeline.run import execute, print_summary
from pipeline.settings import Settings, with_settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_settings
def main(settings: Settings) -> None:
    """Let the target model answer prompts and dump the features that train its drafters."""
    with exit_on_error():
        submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        if submitted and not Path(settings.out).is_absolute():
            raise PipelineError(
                f"--out {settings.out}: must be absolute under `ray job submit`; the job runs in "
                "a temporary directory, and what it writes there is lost"
            )
        settings = settings.model_copy(update={"out": str(Path(settings.out).resolve())})
        ray.init(
            log_to_driver=True,
            configure_logging=False,
            # A private cluster for this process needs no web page; a running one is joined as is.
            **({} if submitted or "RAY_ADDRESS" in os.environ else {"include_dashboard": False}),
        )
        with RunProgress() as progress:
            manifest = execute(settings, lambda run: RayPool(run.spec, progress.say), progress)
        print_summary(manifest, settings.out)


if __name__ == "__main__":
    app()
