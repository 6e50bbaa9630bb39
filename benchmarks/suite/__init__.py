"""This project's cases, launches, results, plots and tables."""
