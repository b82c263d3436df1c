"""Shards as trainers take them: torch tensors in their own dtypes, and examples per drafter."""

from pipeline.loading.blocks import (
    DsparkBlocks,
    Eagle3Examples,
    dspark_blocks,
    eagle3_examples,
)
from pipeline.loading.mtp import (
    MtpBatch,
    MtpExamples,
    assistant_step,
    collate_mtp,
    draw_anchors,
    mtp_anchors,
    mtp_examples,
)
from pipeline.loading.reading import FeatureIndex
from pipeline.loading.rows import FeatureDataset, FeatureStream

__all__ = [
    "DsparkBlocks",
    "Eagle3Examples",
    "FeatureDataset",
    "FeatureIndex",
    "FeatureStream",
    "MtpBatch",
    "MtpExamples",
    "assistant_step",
    "collate_mtp",
    "draw_anchors",
    "dspark_blocks",
    "eagle3_examples",
    "mtp_anchors",
    "mtp_examples",
]
