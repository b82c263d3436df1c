"""`pipeline rollout` and `pipeline extract`: one stage of a run in this process, without Ray."""

from pipeline.execute import LocalWorker, Stage, dry_run, execute
from pipeline.forecast import print_forecast
from pipeline.progress import RunProgress
from pipeline.settings import Settings


def run_stage(settings: Settings, stage: Stage) -> int:
    """Carry out one stage and say what there is then; with --dry-run, forecast both.

    Returns the exit code.
    """
    with RunProgress(quiet=settings.quiet, log_json=settings.log_json) as progress:
        if settings.dry_run:
            told = dry_run(settings, LocalWorker, progress)
        else:
            manifest = execute(settings, LocalWorker, progress, stages=(stage,))
    if settings.dry_run:
        print_forecast(told, settings.out)
    elif stage == "features":
        limit = settings.max_reject_fraction
        return progress.summary(manifest, settings.out, max_reject_fraction=limit)
    elif not settings.quiet:
        made = manifest["rollouts"]
        rows, tokens = (sum(part[key] for part in made) for key in ("rows", "supervised_tokens"))
        print(
            f"{rows:,} conversations with {tokens:,} answer tokens in {len(made)} parts in "
            f"{settings.out}; `pipeline extract` with the same options goes on from here"
        )
    return 0
