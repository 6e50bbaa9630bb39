"""Batch jobs: what a job asks for, the script that a scheduler takes for it, and the jobs that were submitted."""
