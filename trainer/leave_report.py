"""The end of a run for people: report.html in its folder, plots where they are asked for, both given to the tracker.

A run of hours must not fail for its report: what goes wrong here is said in one line, and the figures are on disk.
"""

import logging
import time
from collections.abc import Sequence

from trainer.evaluate.report.page import write_report
from trainer.evaluate.report.plots import write_plots
from trainer.evaluate.report.record import write_record
from trainer.evaluate.samples import Sample
from trainer.prepare import PreparedRun

log = logging.getLogger(__name__)

FAULTS = (OSError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError)
"""A full disk, and whatever figures nobody has thought of can do to a chart."""


def leave_report(run: PreparedRun, samples: Sequence[Sample]) -> None:
    """Write report.json and report.html, after metrics.json; called by the main process."""
    training, data = run.training, run.data
    run_dir, began = training.run_dir, time.monotonic()
    try:
        write_record(
            *(run_dir, samples, data.rows, data.held_out, run.tokenizer),
            sources=data.reports,
            bad_rows=data.bad_rows,
            copies=data.copies,
        )
        report = write_report(run_dir)
        log.debug("report   took %.3f s", time.monotonic() - began)
        for sink in training.sinks:
            sink.add_report(report)
        if training.config.evaluate.plots and not write_plots(run_dir):
            log.warning("report   evaluate.plots=true needs matplotlib, which is not installed; no plots were drawn")
    except FAULTS as error:
        log.warning(
            "report   not written: %s: %s; the run itself is whole. Try again: python scripts/report.py run=%s",
            *(type(error).__name__, error, run_dir),
        )
