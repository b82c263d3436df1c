"""What `pipeline push` says and does."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from pipeline.errors import PipelineError
from pipeline.push import card_license, plan_push, push
from pipeline.units import size_text


def push_run(
    directory: Path,
    repo: str,
    *,
    license_id: str | None,
    private: bool,
    dry_run: bool,
    console: Console,
) -> None:
    """Plan the push, tell it, and carry it out unless it is dry. Raises PipelineError."""

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    if repo.count("/") != 1 or not all(repo.split("/")):
        raise PipelineError(f"REPO {repo}: must be owner/name, as me/drafter-features")
    commits = plan_push(directory, license_id=license_id)
    files = [file for commit in commits for file in commit]
    total = size_text(sum(file.size for file in files))
    say(f"{len(files)} files, {total}, in {len(commits)} commits to dataset {repo}")
    card = files[-1].content
    assert isinstance(card, bytes)  # plan_push puts it last
    if card_license(card) == "unknown":
        say(
            "the card says license: unknown; --license ID states one (answers carry the license "
            "of target model and prompts)"
        )
    if not dry_run:
        say(f"done: {push(commits, repo, private=private, say=say)}")
        return
    for number, commit in enumerate(commits, start=1):
        say(f"commit {number}:")
        for file in commit:
            say(f"  {file.name}  {size_text(file.size)}")
    say("dry run: nothing was sent")
