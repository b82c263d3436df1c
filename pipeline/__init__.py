"""Feature extraction for speculative drafters, from the target model that is served."""

__version__ = "0.1.0"
