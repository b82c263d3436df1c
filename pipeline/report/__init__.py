"""`pipeline report`: one page that says what a run holds. collect -> plots -> page; no torch."""
