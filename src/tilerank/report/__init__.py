"""What the committed records say: the summary, the tables, the pictures and the page. Imports no torch."""

from tilerank.report.markers import update_markers
from tilerank.report.page import Report, build_report
from tilerank.report.records import SUMMARY_FILE, Record, read_records, summarise
from tilerank.report.tables import ladder_csv, print_table, readme_tables

__all__ = [
    "SUMMARY_FILE",
    "Record",
    "Report",
    "build_report",
    "ladder_csv",
    "print_table",
    "read_records",
    "readme_tables",
    "summarise",
    "update_markers",
]
