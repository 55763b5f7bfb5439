"""What a run reports, handed to the sinks that its configuration asks for."""

from collections.abc import Mapping
from pathlib import Path

from dapo.config.schema import Config
from dapo.report.log import MetricsLogger
from dapo.report.sinks.choice import sinks_of


def report_to_sinks(cfg: Config, output_dir: Path, lines: Mapping[int, Mapping[str, float]], resume: int = 0) -> None:
    """Reports metrics by step, a histogram and a text of each, as a run that begins after step `resume`, and ends."""
    logger = MetricsLogger(output_dir, sinks_of(cfg, output_dir))
    logger.resume(resume)
    for step, values in lines.items():
        logger.log(step, values)
        logger.histogram(step, "rollout/lengths", [1.0, 2.0, 5.0])
        logger.text(step, "sample/0", "1 < 2 & <script>")
    logger.close()
