"""A run in the formats that other trainers read, so that extraction changes and the trainer stays.

None of them has positions: rows that were extracted at a random offset are exported as they are.
"""

from pipeline.export.command import Exported, export_run

__all__ = ["Exported", "export_run"]
