"""Files of prompts, however long, as one resumable job."""

from trillion_infer.batch.job import BatchJob
from trillion_infer.batch.source import open_rows

__all__ = ["BatchJob", "open_rows"]
