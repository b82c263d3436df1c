"""Speed beside what bounds it, measured in one run: `python -m pipeline.bench --quick`."""
