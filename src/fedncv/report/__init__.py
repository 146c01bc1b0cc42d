"""Make a page, figures and tables from result files. Trains nothing and imports no training code."""
