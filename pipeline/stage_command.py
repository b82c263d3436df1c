"""`pipeline rollout` and `pipeline extract`: one stage of a run in this process, without Ray."""

from pipeline.execute import LocalWorker, Stage, dry_run, execute
from pipeline.forecast import print_forecast
from pipeline.progress import RunProgress
from pipeline.settings import Settings
from pipeline.summary import print_summary, reject_fraction_exceeded


def run_stage(settings: Settings, stage: Stage) -> int:
    """Carry out one stage and say what there is then; with --dry-run, forecast both.

    Returns the exit code.
    """
    with RunProgress() as progress:
        if settings.dry_run:
            told = dry_run(settings, LocalWorker, progress)
        else:
            manifest = execute(settings, LocalWorker, progress, stages=(stage,))
    if settings.dry_run:
        print_forecast(told, settings.out)
    elif stage == "features":
        print_summary(manifest, settings.out)
        return int(reject_fraction_exceeded(manifest, settings.max_reject_fraction))
    else:
        made = manifest["rollouts"]
        rows, tokens = (sum(part[key] for part in made) for key in ("rows", "supervised_tokens"))
        print(
            f"{rows:,} conversations with {tokens:,} answer tokens in {len(made)} parts in "
            f"{settings.out}; `pipeline extract` with the same options goes on from here"
        )
    return 0
