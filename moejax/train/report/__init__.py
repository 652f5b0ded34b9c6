"""The report of a run: one HTML file that needs nothing but a browser."""

from moejax.train.report.write import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
