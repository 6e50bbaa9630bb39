"""The report of a training: what the ranks note while it lasts (`notes`), and the page made of it (`page`)."""
