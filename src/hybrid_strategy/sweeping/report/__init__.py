"""`report.html` of a sweep: one file that needs nothing else, to be read on any screen."""
