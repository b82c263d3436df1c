"""Validation of a run's folder from its bytes alone; a rule is an id, a function and a test."""

from pipeline.validate.report import Finding, Report, RuleResult
from pipeline.validate.run import RULES, Replay, validate

__all__ = ["RULES", "Finding", "Replay", "Report", "RuleResult", "validate"]
